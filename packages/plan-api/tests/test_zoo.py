"""What the plans of known models refuse."""

import sys

import pytest
import torch
from torch.distributed.tensor import Replicate

from plan_api import options, parallelize, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, TORCH_RELEASE, fake_mesh, models

OF_TOKENS = (
    "deepseek_v3", "gemma3", "gpt2", "gpt_oss", "llama", "mixtral", "qwen3", "qwen3_moe",
)  # fmt: skip
PLANS = (*OF_TOKENS, "dit", "vit")
WITH_EXPERTS = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
OF_ROUTERS = pytest.mark.skipif(
    TORCH_RELEASE < (2, 12), reason="torch 2.11's topk of a DTensor has no backward"
)


@pytest.mark.parametrize("name", PLANS)
def test_sequence_parallelism_needs_tp(mesh, name):
    message = rf"zoo\.{name}: sp=True shards the sequence along tp, which is None"
    with pytest.raises(ValueError, match=message):
        getattr(zoo, name)(mesh, tp=None, dp="dp", sp=True)


@pytest.mark.parametrize("name", OF_TOKENS)
def test_loss_parallelism_needs_tp(mesh, name):
    message = rf"zoo\.{name}: loss_parallel=True shards the vocabulary along tp, which is None"
    with pytest.raises(ValueError, match=message):
        getattr(zoo, name)(mesh, tp=None, dp="dp", loss_parallel=True)


@pytest.mark.parametrize("name", PLANS)
def test_missing_axes_are_named(mesh, name):
    with pytest.raises(ValueError, match=r"axes \('dp', 'tp'\), not 'ep'"):
        getattr(zoo, name)(mesh, tp="ep")
    with pytest.raises(ValueError, match=r"axes \('dp', 'tp'\), not 'ddp'"):
        getattr(zoo, name)(mesh, dp="ddp")


@pytest.mark.parametrize("name", ["deepseek_v3", "dit", "gpt2", "mixtral", "qwen3_moe"])
def test_fused_projections_need_ragged_shard(mesh, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "ragged_shard", None)
    with pytest.raises(ImportError, match=rf"zoo\.{name}: .*pip install plan-api\[ragged\]"):
        getattr(zoo, name)(mesh)
    getattr(zoo, name)(mesh, tp=None, dp="dp")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[OF_ROUTERS] if name in WITH_EXPERTS else []) for name in OF_TOKENS],
)
def test_without_a_data_axis_the_batch_is_replicated(name, monkeypatch):
    # torch 2.11's DTensor does not flatten a batch of several sequences and sharded heads.
    ids = torch.arange(16).view(2 if FLATTENS_TWO_SHARDED_DIMS else 1, -1)
    monkeypatch.setattr(options, "find_spec", lambda name: name == "fused_comm" or None)
    with fake_mesh((2,), ("tp",)) as mesh:
        layers = {"dense": 1} if name == "deepseek_v3" else {}
        model = parallelize(getattr(models, name)().eval(), getattr(zoo, name)(mesh, **layers))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert loss.placements == model.lm_head.weight.grad.placements == (Replicate(),)
