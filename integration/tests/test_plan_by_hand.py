"""Planned steps communicate as the models of plan-api's benchmarks, which are parallel by hand."""

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from integration.models.dit import DiffusionLoss, DiT
from plan_api import Plan, generate_static, parallelize, plan_communication, zoo
from ragged_shard import InterleavedShard
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, CommLog, fake_mesh, models

pytestmark = pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)

BENCHMARKS = Path(__file__).parents[2] / "packages" / "plan-api" / "benchmarks"
HIDDEN, RANKS, BATCH, TOKENS = 64, 8, 8, 16
LAYER = r"model\.layers\.\d+"


def _of_transformers(make):
    return make(
        hidden_size=HIDDEN, intermediate_size=128, num_attention_heads=8, num_key_value_heads=8
    )


def _dit():
    torch.manual_seed(0)
    model = DiffusionLoss(DiT(hidden_size=HIDDEN, num_heads=8)).train()
    return models.nowhere_zero(model)


def _tokens():
    ids = torch.randint(0, models.VOCABULARY, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": ids}


def _images():
    images, noise = torch.randn(2, BATCH, 4, 8, 8)
    numbers = torch.randint(0, 10, (BATCH,))
    return {"x": images, "t": numbers, "y": numbers, "noise": noise}


def _weights(mesh, columns, rows):
    """Shards weights; all that the script and the model create is replicated."""
    plan = Plan(mesh)
    for path in ("<in:input_ids>", "<in:labels>", r"model\.rotary_emb.<in:position_ids>"):
        plan.shard(path, Replicate())
    plan.shard(rf"{LAYER}.<in:attention_mask>", Replicate())
    plan.shard(rf"{LAYER}\..*\.{columns}\.weight", Shard(0))
    return plan.shard(rf"{LAYER}\..*\.{rows}\.weight", Shard(1))


def _llama_plan(mesh):
    return _weights(mesh, "(q|k|v|gate|up)_proj", "(o|down)_proj")


def _mixtral_plan(mesh):
    plan, experts = _weights(mesh, "(q|k|v)_proj", "o_proj"), rf"{LAYER}\.mlp\.experts"
    plan.shard(rf"{experts}\.gate_up_proj", InterleavedShard(1, 2))
    plan.shard(rf"{experts}\.down_proj", Shard(2))
    plan.redistribute(rf"{LAYER}\.(self_attn\.o_proj|mlp).<out>", Partial(), Replicate())
    return plan.local(experts, Partial())


def _dit_plan(mesh):
    return zoo.dit(mesh).under("model")


CASES = {
    "llama": (partial(_of_transformers, models.llama), _tokens, _llama_plan),
    "mixtral": (partial(_of_transformers, models.mixtral), _tokens, _mixtral_plan),
    "dit": (_dit, _images, _dit_plan),
}


def _collectives(model, batch):
    """Counts the collectives of a second step by name, reduction and bytes."""

    def step():
        result = model(**batch)
        (result if isinstance(result, torch.Tensor) else result.loss).backward()
        model.zero_grad()

    step()
    with CommLog() as log:
        step()
    return Counter((call.op, call.input_bytes, call.output_bytes) for call in log.calls)


@pytest.mark.slow  # plan-api's test_communication counts those of one layer
@pytest.mark.parametrize("name", CASES)
def test_both_modes_communicate_as_the_model_by_hand(name, monkeypatch):
    """In kind, number and bytes; from plans of LLaMA and Mixtral that have no gradients."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from by_hand import by_hand

    make, inputs, plan_of = CASES[name]
    batch = inputs()
    with fake_mesh((RANKS,), ("tp",)) as mesh:
        expected = _collectives(by_hand(make(), mesh), batch)
        written = plan_of(mesh)
        eager = plan_communication(written, make(), batch, fake=name != "mixtral")
        static = generate_static(written, make(), batch)
        assert expected.total() >= 8
        assert _collectives(parallelize(make(), eager), batch) == expected
        model = parallelize(make(), static, mode="static", guard_steps=0)
        assert _collectives(model, batch) == expected
