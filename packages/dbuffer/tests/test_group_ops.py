"""Operators on whole buffers against the same on each tensor."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from dbuffer import DBuffer
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import each_rank, fake_mesh

S0, R = Shard(0), Replicate()
SHAPES = {"a": (5, 3), "s": (), "e": (0, 4), "b": (7,), "c": (4, 4)}
LAYOUT = plan_layout(
    [TensorSpec(n, torch.Size(s).numel(), min(3, max(1, torch.Size(s).numel())), s)
     for n, s in SHAPES.items()],
    2, alignment=8,
)  # fmt: skip


class Calls(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **kwargs or {})


def tensors(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return {n: torch.randn(s).to(dtype) for n, s in SHAPES.items()}


def whole(mesh, seed=0, dtype=torch.float32):
    buffer = DBuffer(LAYOUT, mesh, [R], dtype)
    buffer.copy_from(tensors(seed))
    return buffer


def assert_holds(buffer, wanted):
    for name, tensor in wanted.items():
        assert torch.equal(buffer.view(name), tensor.to(buffer.dtype)), name
    for gap in LAYOUT.padding_intervals():
        assert not buffer.local[gap.start : gap.stop].any()


def test_each_is_that_of_every_tensor():
    with fake_mesh((2,)) as mesh:
        buffer, first, second = whole(mesh), tensors(0), tensors(1)
        assert_holds(buffer, first)
        buffer.scale_(0.5)
        assert_holds(buffer, {n: t * 0.5 for n, t in first.items()})
        buffer.add_(whole(mesh, 1), alpha=3.0)
        assert_holds(buffer, {n: (t * 0.5).add_(second[n], alpha=3.0) for n, t in first.items()})
        buffer.copy_(whole(mesh, 1))
        assert_holds(buffer, second)
        buffer.zero_()
        assert_holds(buffer, {n: torch.zeros(s) for n, s in SHAPES.items()})


def test_each_is_one_kernel():
    with fake_mesh((2,)) as mesh:
        buffer, other = whole(mesh), whole(mesh, 1, torch.bfloat16)
        with Calls() as calls:
            buffer.scale_(2.0)
            buffer.add_(other)
            buffer.copy_(other)
            buffer.zero_()
        assert calls.names == ["mul_.Tensor", "add_.Tensor", "copy_.default", "zero_.default"]


def test_tensors_come_in_by_one_pass():
    given = list(tensors(1, torch.bfloat16).values())
    with fake_mesh((2,)) as mesh:
        buffer = whole(mesh)
        buffer.copy_from(given)
        buffer.add_from(given)
        with Calls() as calls:
            buffer.copy_from(given)
            buffer.add_from(given, alpha=0.5)
        kernels = [n for n in calls.names if n.startswith("_foreach")]
        assert kernels == ["_foreach_zero_.default", "_foreach_copy_.default", "_foreach_add_.List"]
        assert not {"empty", "clone", "_to_copy"} & {n.split(".")[0] for n in calls.names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_cast_and_scaled_on_the_way_in(dtype):
    given = tensors(1, dtype)
    with fake_mesh((2,)) as mesh:
        buffer = whole(mesh)
        buffer.copy_from(given, scale=0.25)
        assert_holds(buffer, {n: t.float() * 0.25 for n, t in given.items()})
        buffer.add_from(given, alpha=2.0)
        assert_holds(buffer, {n: t.float() * 2.25 for n, t in given.items()})


def test_those_that_are_missing_are_zero_and_add_nothing():
    given = tensors(1)
    with fake_mesh((2,)) as mesh:
        buffer = whole(mesh)
        buffer.local.fill_(7.0)  # padding too
        buffer.copy_from([given["a"], None, None, given["b"], None])
        expected = {n: t if n in "ab" else torch.zeros_like(t) for n, t in given.items()}
        assert_holds(buffer, expected)
        buffer.add_from({"c": given["c"], 0: given["a"]})
        assert_holds(buffer, expected | {"c": given["c"], "a": 2 * given["a"]})


@pytest.mark.parametrize("full", [False, True], ids=["shard", "full"])
def test_a_sharded_buffer_keeps_its_part(full):
    given, strided = tensors(), torch.randn(3, 5).t()
    for rank, mesh in each_rank((2,)):
        buffer = DBuffer(LAYOUT, mesh, [S0], torch.float32, full=full)
        buffer.copy_from(given | {"a": strided})
        buffer.add_from(given)
        whole_one = DBuffer(LAYOUT, mesh, [R], torch.float32)
        whole_one.copy_from(given | {"a": strided})
        whole_one.add_from(given)
        begin = rank * LAYOUT.shard_size
        assert torch.equal(buffer.local, whole_one.local[begin : begin + LAYOUT.shard_size])


def test_a_copy_takes_the_placements_over_and_puts_a_shard_in_its_place():
    for rank, mesh in each_rank((2, 2)):
        small = DBuffer(LAYOUT, mesh, [R, S0], torch.float32)
        small.copy_from(tensors())
        full = DBuffer(LAYOUT, mesh, [Partial(), Partial()], torch.bfloat16)
        full.zero_()
        full.copy_(small)
        assert full.placements == (R, S0)
        assert torch.equal(full.local, small.local.bfloat16())
        full.set_placements([R, R])
        begin = rank % 2 * LAYOUT.shard_size
        assert torch.equal(full.local[begin:][: LAYOUT.shard_size], small.local.bfloat16())
        assert full.local.count_nonzero() == small.local.count_nonzero()
