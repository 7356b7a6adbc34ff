"""Under `torch.autocast` plans compute in the dtypes of one device."""

from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from plan_api import Plan, parallelize, zoo
from plan_api.ops.autocast import cast_down, cast_up
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, CommLog, models, run_ranks

DTYPES = (torch.bfloat16, torch.float16)
SENDS = ("send", "all_gather", "all_to_all")  # of attention


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_floats_of_at_most_32_bits_are_cast_within_autocast_only(dtype):
    low, wide, whole = torch.ones(2, dtype=dtype), torch.ones(2).double(), torch.ones(2).long()
    assert cast_down(torch.ones(2))[0].dtype == torch.float32
    assert cast_up(low) is low
    with torch.autocast("cpu", dtype):
        cast = cast_down(torch.ones(2), low, wide, whole)
        assert [one.dtype for one in cast] == [dtype, dtype, torch.float64, torch.int64]
        assert cast_up(low).dtype == torch.float32
        assert cast_up(wide) is wide


def _autocast(model, dtype):
    """Makes forward run under autocast, and a copy of the model run its own."""
    forward = torch.autocast("cpu", dtype)(model.forward.__func__)
    model.forward = MethodType(forward, model)
    return model


@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])]
)
@pytest.mark.parametrize(
    "method", ["ring", "ulysses", pytest.param("all-gather", marks=pytest.mark.slow)]
)
def test_context_parallel_attention_is_computed_in_the_dtype_of_autocast(method, dtype):
    """Where queries and keys are in fp32, after rotary embeddings, and values are not."""

    def make():
        return _autocast(models.llama(attn_implementation="sdpa"), dtype)

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        plan = zoo.llama(mesh, tp=None, cp="cp", cp_method=method)
        found = []
        for mode in ("eager", "static"):
            model = parallelize(make(), plan, mode=mode)
            losses = models.train(model, models.token_loss, steps=4)
            with CommLog() as log, torch.no_grad():
                models.token_loss(model)
            sent = {call.dtype for call in log.calls if call.op in SENDS}
            found.append((losses, sent))
        return models.train(make(), models.token_loss, steps=4), found

    for alone, ((eager, sent), static) in run_ranks(check, 2, timeout=120):
        assert static == (eager, sent)
        assert sent == {str(dtype).removeprefix("torch.")}
        assert eager == pytest.approx(alone, abs=1e-3)


class _Loss(nn.Module):
    def __init__(self, smoothing):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits, labels):
        return F.cross_entropy(logits, labels, label_smoothing=self.smoothing)


@pytest.mark.ranks
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_sharded_classes_are_computed_in_fp32(smoothing):
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 8, dtype=torch.bfloat16), torch.randint(0, 8, (6,))

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan(mesh).redistribute("<in:logits>", Replicate(), Shard(1), "tp")
        plan.annotate("<op:cross_entropy>", Shard(1), "tp")
        static = parallelize(_Loss(smoothing), plan, mode="static", guard_steps=0)
        eager = parallelize(_Loss(smoothing), Plan(mesh))
        with torch.autocast("cpu", torch.bfloat16):
            return (
                static(logits, labels),
                eager(
                    distribute_tensor(logits, mesh, [Shard(1)]),
                    distribute_tensor(labels, mesh, [Replicate()]),
                ).full_tensor(),
            )

    expected = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
    for losses in run_ranks(check, 2):
        for loss in losses:
            assert loss.dtype == torch.float32
            torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
