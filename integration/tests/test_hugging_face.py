"""Weights come from safetensors and go back to them, the same bytes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fsdp.checkpoint import load_safetensors, save_safetensors
from integration.errors import UsageError
from integration.hugging_face.__main__ import main as export
from integration.hugging_face.names import names_in_files
from integration.models import model_shape
from integration.train.checkpoint.checkpoint import FOLDER
from integration.train.config import TrainConfig
from integration.train.setup import prepare
from testkit import run_ranks
from testkit.inspection.memory import peak_bytes


def tensors(folder):
    """All tensors of a folder's files, by name."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def assert_same_bytes(first, second):
    first, second = tensors(first), tensors(second)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []
    assert [t.dtype for t in first.values()] == [second[name].dtype for name in first]


def write_llama(folder, **options):
    torch.manual_seed(5)
    model = model_shape("llama-tiny").build(dropout=0.0)
    model.save_pretrained(folder, **options)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder as save_pretrained writes it, of several files and an index."""
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


def save_untrained(runs):
    """On each rank: make the runs' models of the folder, and write checkpoints of step 0."""
    import torch.distributed as dist

    from integration.train.launch.world import World
    from integration.train.loop import Trainer

    world = World(dist.get_rank(), dist.get_world_size())
    for options in runs:
        Trainer(prepare(TrainConfig(model="llama-tiny", **options), world.size), world).save()


SYSTEMS = {
    "ddp": {"system": "ddp"},
    "fsdp1": {"system": "fsdp1"},
    "fsdp2": {"system": "fsdp2"},
    "fsdp": {"system": "fsdp"},
    "dtensor-tp": {"system": "dtensor-tp"},
    "plan-tp": {"system": "plan", "tp": 2, "sp": True},
    "plan-fsdp": {"system": "plan", "dp_shard": 2},
    "plan-zero3": {"system": "plan", "dp_shard": 2, "zero3": True},
}


FAST = ("fsdp", "plan-tp")
OTHERS = tuple(name for name in SYSTEMS if name not in FAST)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "names",
    [
        FAST,
        pytest.param(OTHERS, marks=pytest.mark.slow),
    ],
    ids=["some", "others"],
)
def test_every_system_writes_the_bytes_that_it_was_given(names, llama, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    several = {name: SYSTEMS[name] for name in names}
    for ranks, systems in ((1, {"single": {"system": "single"}}), (2, several)):
        runs = [
            {"out": tmp_path / name, "init_from": llama, "micro_batch": 2} | system
            for name, system in systems.items()
        ]
        run_ranks(save_untrained, ranks, runs, timeout=300)
        for name in systems:
            path, out = tmp_path / name / FOLDER / "step-00000000", tmp_path / f"{name}-out"
            assert export([str(path), str(out), "--json"]) == 0
            printed = capsys.readouterr()
            found = json.loads(printed.out)
            assert found["files"] == ["model.safetensors"]
            assert found["bytes"] == sum(t.nbytes for t in tensors(out).values())
            assert (found["checkpoint"], found["step"]) == (str(path), 0)
            assert printed.err == f"exported: step 0, 0.44 MiB in 1 file: {out}\n"
            assert_same_bytes(llama, out)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "single-out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(llama).items())


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        "fsdp",
        "plan-tp",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fsdp2", "dtensor-tp", "plan-zero3")
        ),
    ],
)
def test_no_rank_ever_holds_the_whole_model(name, tmp_path):
    torch.manual_seed(5)
    model = model_shape("llama-10m").build(dropout=0.0)
    model.save_pretrained(tmp_path / "weights")
    whole = sum(p.nbytes for p in model.parameters())

    def prepare_model(out, system):
        import torch.distributed as dist

        from integration.train.launch.world import World
        from integration.train.model.parallel_model import parallel_model

        config = TrainConfig(
            model="llama-10m", out=Path(out) / "run", init_from=Path(out) / "weights", **system
        )
        setup = prepare(config, 2)
        peak, parallel = peak_bytes(lambda: parallel_model(setup, World(dist.get_rank(), 2)))
        return peak, sum(getattr(p, "_local_tensor", p).nbytes for p in parallel.model.parameters())

    for peak, part in run_ranks(prepare_model, 2, str(tmp_path), SYSTEMS[name], timeout=300):
        assert part < 0.6 * whole
        assert peak < part + 0.2 * whole


@pytest.mark.ranks
def test_a_model_that_was_never_whole_trains_as_one_that_was(llama, train_runs, tmp_path):
    systems = [SYSTEMS[name] for name in ("ddp", "fsdp2", "fsdp", "dtensor-tp", "plan-zero3")]
    runs = [{"init_from": llama} | system for system in systems]
    expected, *others = train_runs(2, runs, out=tmp_path, steps=2)
    for losses in others:
        assert losses == pytest.approx(expected, abs=1e-5)


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=64,
    )
    return MixtralForCausalLM(config)


@pytest.mark.ranks
def test_experts_that_are_one_parameter_here_and_many_tensors_there(tmp_path):
    torch.manual_seed(5)
    model = mixtral()
    model.save_pretrained(tmp_path / "hf")
    names = tensors(tmp_path / "hf").keys()
    assert "model.layers.1.block_sparse_moe.experts.3.w3.weight" in names
    rename = names_in_files(model)
    save_safetensors(model, tmp_path / "written", rename=rename, max_shard_bytes=50_000)
    assert len(list((tmp_path / "written").glob("*.safetensors"))) > 2
    assert_same_bytes(tmp_path / "hf", tmp_path / "written")

    def load(folder, expected):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard as native
        from torch.distributed.tensor import Shard

        from fsdp import Rows, fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for cut in (
            # Elements of an expert on two ranks: boxes that are no slice of any dim.
            lambda model: fully_shard(model, mesh=mesh),
            lambda model: fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Rows(7)),
            lambda model: native(
                model, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else None
            ),
        ):
            torch.manual_seed(6)
            other = mixtral()
            cut(other)
            load_safetensors(other, Path(folder), rename=names_in_files(mixtral()))
            for name, param in other.named_parameters():
                assert torch.equal(param.full_tensor(), expected[name]), name

    run_ranks(load, 2, str(tmp_path / "hf"), dict(model.state_dict()), timeout=240)


def test_of_tied_weights_files_hold_one(tmp_path):
    from dataclasses import replace

    shape = replace(model_shape("llama-tiny"), tie_word_embeddings=True)
    model, other = (shape.build(dropout=0.0) for _ in range(2))
    model.save_pretrained(tmp_path / "hf")
    save_safetensors(model, tmp_path / "written")
    assert_same_bytes(tmp_path / "hf", tmp_path / "written")
    load_safetensors(other, tmp_path / "hf")
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


def edit(folder, change):
    from safetensors.torch import save_file

    changed = tensors(folder)
    change(changed)
    save_file(changed, folder / "model.safetensors")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: edit(d, lambda t: t.pop(NORM)), f"expected the tensor '{NORM}' in .*, got none"),
        (
            lambda d: edit(d, lambda t: t.update({NORM: torch.ones(63)})),
            rf"expected '{NORM}' of shape \(64,\) in .*, got \(63,\)",
        ),
        (
            lambda d: edit(d, lambda t: t.update(more=torch.ones(1))),
            "got 'more', which it does not have",
        ),
        (
            lambda d: (d / "config.json").write_text(json.dumps({"num_attention_heads": 8})),
            "another model: its num_attention_heads is 8, this model's is 4; give another --model",
        ),
        (lambda d: (d / "model.safetensors").write_bytes(b"x"), "safetensors cannot be read"),
        (lambda d: (d / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda d: (d / "model.safetensors").unlink(), "folder with model.safetensors or model.s"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text("{}"),
            "index.json cannot be read .it has no weight_map",
        ),
        (
            lambda d: (d / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "b.safetensors"}}'
            ),
            "b.safetensors cannot be read",
        ),
    ],
    ids=["missing", "shape", "extra", "config", "damaged", "json", "none", "index", "part"],
)
def test_a_folder_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path, change, message
):
    write_llama(tmp_path / "hf")
    change(tmp_path / "hf")
    config = TrainConfig(model="llama-tiny", out=tmp_path / "run", init_from=tmp_path / "hf")
    with pytest.raises(UsageError, match=message):
        prepare(config, 1)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_none_is_refused(tmp_path):
    config = TrainConfig(model="llama-tiny", out=tmp_path / "run", init_from=tmp_path / "no")
    with pytest.raises(
        UsageError, match=r"as save_pretrained writes it, got .*no, which is no folder"
    ):
        prepare(config, 1)


@pytest.mark.parametrize(
    ("checkpoint", "out", "sentence"),
    [
        ("nowhere", "out", "nowhere is not a complete checkpoint"),
        ("nowhere", "file/out", "nowhere is not a complete checkpoint"),
    ],
)
def test_exporting_an_invalid_checkpoint_is_one_sentence(
    tmp_path, checkpoint, out, sentence, capsys
):
    assert export([str(tmp_path / checkpoint), str(tmp_path / out)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert sentence in message
    assert list(tmp_path.iterdir()) == []
