"""Activation checkpointing: the same numbers, the same names, less memory."""

from collections import Counter

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.utils._python_dispatch import TorchDispatchMode

from integration.models import LlamaShape, build_model_on_meta, model_shape
from integration.systems import Degrees
from integration.systems.base import LayerPolicies
from integration.systems.zoo import add_layer_policies, plan_of
from integration.train.config import TrainConfig
from integration.train.launch.world import process_group
from integration.train.loop import Trainer
from integration.train.model.activation_checkpointing import recompute_activations
from integration.train.setup import prepare
from plan_api import lower
from testkit import fake_mesh
from testkit.inspection.memory import peak_bytes

MODES = ("full", "selective-op", "selective-layer")


RUNS = {
    "single": (1, {"system": "single"}),
    "ddp": (2, {"system": "ddp"}),
    "fsdp1": (2, {"system": "fsdp1"}),
    "fsdp2": (2, {"system": "fsdp2"}),
    "fsdp": (2, {"system": "fsdp"}),
    "dtensor-tp": (2, {"system": "dtensor-tp"}),
    "plan, tp and sp": (2, {"system": "plan", "tp": 2, "sp": True}),
    "plan, fsdp": (2, {"system": "plan", "dp_shard": 2}),
    "fsdp, Mixtral": (2, {"system": "fsdp", "model": "mixtral-tiny"}),
    "fsdp2, DiT": (2, {"system": "fsdp2", "model": "dit-tiny"}),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        name if name == "plan, tp and sp" else pytest.param(name, marks=pytest.mark.slow)
        for name in RUNS
    ],
)
def test_losses_are_those_without_it_bit_for_bit(name, train_runs, tmp_path):
    ranks, options = RUNS[name]
    runs = [{"activation_checkpointing": mode} | options for mode in ("none", *MODES)]
    expected, *losses = train_runs(ranks, runs, out=tmp_path, steps=2)
    assert dict(zip(MODES, losses, strict=True)) == dict.fromkeys(MODES, expected)


@pytest.mark.ranks
@pytest.mark.slow
def test_losses_are_those_without_it_where_dispatched_rows_are_kept(train_runs, tmp_path):
    plan = {"system": "plan", "model": "mixtral-tiny", "dp_shard": 2, "ep": 2, "ep_chunks": 2}
    runs = [
        plan | {"activation_checkpointing": mode, "static": static}
        for static in (False, True)
        for mode in ("none", "keep-dispatch")
    ]
    eager, eager_again, static, static_again = train_runs(2, runs, out=tmp_path, steps=2)
    assert eager_again == eager
    assert static_again == static


def test_layers_without_experts_are_recomputed_beside_those_that_keep_dispatched_rows():
    shape = model_shape("deepseek-v3-tiny")
    with fake_mesh((2,), ("ep",)) as mesh:
        plan = plan_of(shape, mesh, Degrees(dp_replicate=2, ep=2))
        add_layer_policies(plan, LayerPolicies("keep-dispatch"), shape, shape.num_hidden_layers)
        found = lower(plan, build_model_on_meta(shape, dropout=0.0)).recomputed
    assert {path: policy.value for path, policy in found.items()} == {
        "model.layers.0": "full",
        "model.layers.1": "keep-dispatch",
    }


@pytest.fixture(scope="module")
def peaks():
    """The bytes that forward and backward take at most, by mode."""
    shape = LlamaShape(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    tokens = torch.arange(512).view(2, 256) % 256
    found = {}
    for mode in ("none", *MODES):
        model = shape.build(dropout=0.0)
        recompute_activations(shape.layers_of(model), mode, every=2)
        found[mode], _ = peak_bytes(
            lambda model=model: model(input_ids=tokens, labels=tokens).loss.backward()
        )
    return found


@pytest.mark.slow
def test_the_more_is_computed_again_the_less_memory_is_held(peaks):
    assert peaks["full"] < 0.5 * peaks["none"]
    assert peaks["full"] < peaks["selective-layer"] < 0.8 * peaks["none"]
    assert peaks["full"] < peaks["selective-op"] < 0.8 * peaks["none"]


@pytest.mark.parametrize(("every", "wrapped"), [(1, [0, 1, 2]), (2, [0, 2]), (3, [0])])
def test_selective_by_layer_takes_every_nth(every, wrapped):
    layers = [torch.nn.Linear(1, 1) for _ in range(3)]
    recompute_activations(layers, "selective-layer", every=every)
    assert [i for i, layer in enumerate(layers) if "forward" in vars(layer)] == wrapped


class Calls(TorchDispatchMode):
    """Counts operators that run; what is taken from memory instead does not."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def test_matrix_products_and_attention_are_not_computed_again():
    calls = {}
    for mode in MODES:
        shape = LlamaShape(64, 128, 1, 4, 4)
        model = shape.build(dropout=0.0)
        recompute_activations(shape.layers_of(model), mode, every=1)
        tokens = torch.arange(16).view(1, 16)
        loss = model(input_ids=tokens, labels=tokens).loss
        with Calls() as calls[mode]:
            loss.backward()
    full, selective = calls["full"].counts, calls["selective-op"].counts
    # Six of a layer's seven: torch stops before what leads to no saved tensor.
    assert full[torch.ops.aten.mm.default] == selective[torch.ops.aten.mm.default] + 6
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert (full[attention], selective[attention]) == (1, 0)
    silu = torch.ops.aten.silu.default
    assert (full[silu], selective[silu]) == (1, 1)


def test_checkpoints_and_dropout_masks_are_those_without_it(tmp_path):
    found = {}
    for mode in ("none", "full"):
        config = TrainConfig(
            model="llama-tiny",
            out=tmp_path / mode,
            dropout=0.1,
            fingerprint=True,
            activation_checkpointing=mode,
        )
        with process_group(60) as world:
            trainer = Trainer(prepare(config, 1), world)
            loss = trainer.train_step()
            names = FileSystemReader(trainer.save()).read_metadata().state_dict_metadata.keys()
            found[mode] = (float(loss), trainer._first_masks, sorted(names))
    assert found["full"][1] is not None
    assert found["full"] == found["none"]
