"""Redistributions in C++ beside torch's own: values bitwise, strides, aliasing, collectives.

Cheapest first: what is planned and what is left to torch; every pair of placements on every rank of
fake meshes (strides, collectives); the same pairs on gloo ranks (values).
"""

import contextlib
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_rules import _compat
from dtensor_rules._core import Chunk, Divide, MultiAxisGather, StridedChunk
from dtensor_rules.redistribution import plan_redistribution
from testkit import Case, CommLog, assert_bitwise, each_rank, run_ranks

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
SUM, AVG, MAX = Partial("sum"), Partial("avg"), Partial("max")
PLACEMENTS = (R, SUM, AVG, MAX, S0, S1, S2)
STRIDED = tuple(_StridedShard(dim, split_factor=3) for dim in (0, 1))
# To 2.11 the flag says that these are no shard order.
NO_ORDER = {} if _compat.RELEASE >= (2, 12) else {"use_strided_shard_as_shard_order": False}
ON_TWO_AXES = tuple(itertools.product((R, SUM, MAX, S0, S1), repeat=2))
# Even, uneven and empty shards on 2 and on 4 ranks.
SHAPES = ((8,), (5,), (1,), (0,), (8, 4), (5, 7), (3, 2), (0, 3), (1, 4), (4, 8, 12), (5, 1, 3))
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.complex64, torch.bool)


@dataclass(frozen=True)
class Outcome:
    """What became of one redistribution: a tensor, or the error in a word."""

    error: str = ""
    tensor: torch.Tensor | None = None
    is_input: bool = False


def spec(mesh, placements, tensor, **kwargs):
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensorSpec(mesh, tuple(placements), meta, **kwargs)


def fits(placements, shape):
    return all(p.dim < len(shape) for p in placements if isinstance(p, Shard | _StridedShard))


def layouts(local, *, every):
    """A local tensor, or all memory layouts of it that a step might take differently."""
    yield local
    if every and local.ndim > 1:
        yield local.mT.contiguous().mT
        yield torch.cat([local, local], -1).narrow(-1, 0, local.shape[-1])  # of a larger storage


def outcome(function, local):
    try:
        result = function(local)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        return Outcome(error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return Outcome(tensor=result, is_input=result is local)


def assert_same(actual, expected, what, *, values):
    assert actual.error == expected.error, what
    assert actual.is_input == expected.is_input, what
    if actual.tensor is None:
        return
    assert type(actual.tensor) is torch.Tensor, what
    assert actual.tensor.shape == expected.tensor.shape, what
    assert actual.tensor.dtype == expected.tensor.dtype, what
    assert actual.tensor.stride() == expected.tensor.stride(), what
    assert actual.tensor.storage_offset() == expected.tensor.storage_offset(), what
    assert not actual.tensor.requires_grad, what
    if values:
        assert_bitwise(actual.tensor, expected.tensor, what)


def redistributions(mesh, pairs, shapes, dtype, *, every_layout):
    """Every redistribution of the table that this rank can plan: what it is, specs, plan, local."""
    for shape, (source, target) in itertools.product(shapes, pairs):
        if not fits((*source, *target), shape):
            continue
        case = Case(tuple(mesh.shape), source, shape, dtype)
        if dtype is torch.bool and case.partial:
            continue
        whole = case.tensor()
        src, dst = spec(mesh, source, whole), spec(mesh, target, whole)
        plan = plan_redistribution(src, dst)
        assert (plan is not None) == possible(source, target), (source, target)
        if plan is None:
            if filled_by_torch(source, target):
                continue
            with pytest.raises((RuntimeError, ValueError, AssertionError)):
                _redistribute.redistribute_local_tensor(case.local(mesh, whole), src, dst)
            continue
        for local in layouts(case.local(mesh, whole), every=every_layout):
            yield f"{source} to {target} of {shape} with {local.stride()}", src, dst, plan, local


def possible(source, target):
    """Whether torch has a way between placements of these tests."""
    for placements in (source, target):
        reduce_ops = {p.reduce_op for p in placements if p.is_partial()}
        if len(reduce_ops) > 1 and reduce_ops != {"sum", "avg"}:
            return False
    return not any(
        new.is_partial() and not old.is_replicate() and old != new
        for old, new in zip(source, target, strict=True)
    )


def filled_by_torch(source, target):
    """Whether torch fills a shard with zeros to make it part of a sum."""
    to_sum = any(old.is_shard() and new == SUM for old, new in zip(source, target, strict=True))
    return to_sum and _compat.RELEASE >= (2, 14)


def compare(mesh, pairs, shapes, dtype=torch.float32, *, values, every_layout=False):
    """Runs all natively and then by plan, on every rank in the same order; returns how many ran.

    Collectives are torch's, except where gathers are merged: there they are at most as many.
    """
    table = list(redistributions(mesh, pairs, shapes, dtype, every_layout=every_layout))
    as_torchs = [row for row in table if not merges_gathers(row[3])]
    merged = [row for row in table if merges_gathers(row[3])]
    expected, actual = run_both(as_torchs, values=values)
    assert actual == expected
    expected, actual = run_both(merged, values=values)
    assert len(actual) == sum(collectives(plan) for *_, plan, _ in merged)
    assert len(actual) <= len(expected)
    return len(table)


def run_both(table, *, values):
    """The collectives of the native redistribution and of the plan."""
    copies = [local.clone() for *_, local in table]
    with CommLog() as log:
        expected = [
            outcome(
                lambda local, s=src, d=dst: _redistribute.redistribute_local_tensor(local, s, d),
                local,
            )
            for _, src, dst, _, local in table
        ]
    with CommLog() as our_log:
        actual = [outcome(plan.apply, local) for _, _, _, plan, local in table]
    for row, result, reference, before in zip(table, actual, expected, copies, strict=True):
        what, _, _, plan, local = row
        assert_same(result, reference, what, values=values or not plan.communicates)
        assert_bitwise(local, before, f"the input of {what}")
    return log.calls, our_log.calls


def merges_gathers(plan):
    return any(isinstance(step, MultiAxisGather) for step in plan.steps)


def collectives(plan):
    return sum(not isinstance(step, Chunk | StridedChunk | Divide) for step in plan.steps)


def pairs_of(placements):
    return tuple(itertools.product(placements, repeat=2))


ONE_AXIS = pairs_of([(placement,) for placement in PLACEMENTS])
TWO_AXES = pairs_of(ON_TWO_AXES)


# Fake meshes: every rank's strides and collectives.


@pytest.mark.parametrize("shape", [(4, 8), (5, 7), (1, 3), (6, 4, 2), (2, 3, 5)], ids=str)
@pytest.mark.parametrize(("source", "target"), [(S0, S1), (S1, S0)], ids=str)
def test_the_real_all_to_all(source, target, shape):
    for _, mesh in each_rank((2,)):
        cuda = DeviceMesh("cuda", mesh.mesh, _init_backend=False, _rank=mesh.get_rank())
        cuda._dim_group_names = mesh._dim_group_names  # a CUDA mesh, but tensors that exist here
        compare(cuda, [((source,), (target,))], [shape], values=False, every_layout=True)


# The tests of values on ranks compare these too; what is left is what no rank is needed for.
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_strides_and_collectives_on_one_axis(world_size):
    ran = [
        compare(mesh, ONE_AXIS, SHAPES, values=False, every_layout=world_size == 2)
        for _, mesh in each_rank((world_size,))
    ]
    assert min(ran) > 200


@pytest.mark.slow
def test_strides_and_collectives_on_two_axes():
    ran = [compare(mesh, TWO_AXES, [(5, 3)], values=False) for _, mesh in each_rank((2, 2))]
    assert min(ran) > 300


def test_strides_and_collectives_on_a_four_dimensional_tensor():
    pairs = pairs_of([(R,), (SUM,), (S0,), (S1,), (S2,), (Shard(3),)])
    for _, mesh in each_rank((2,)):
        shapes = [(2, 4, 2, 6), (3, 1, 5, 1), (2, 1, 1, 3)]
        compare(mesh, pairs, shapes, values=False, every_layout=True)


# Gloo ranks: values.


def compare_strided(shape):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    pairs = [pair for pair in pairs_of([*STRIDED, R, SUM, S0, S1]) if set(pair) & set(STRIDED)]
    for (source, target), transposed in itertools.product(pairs, (False, True)):
        src, dst = (spec(mesh, [place], whole, **NO_ORDER) for place in (source, target))
        plan = plan_redistribution(src, dst)
        # To a sum 2.11 goes by way of a replica, and the others do not go at all.
        assert (plan is not None) == (target != SUM or _compat.RELEASE < (2, 12)), (source, target)
        if plan is None:
            continue
        local = (
            source._select_split_tensor(whole, mesh.size(), mesh.get_rank(), with_padding=False)
            if isinstance(source, Shard | _StridedShard)
            else whole
        )
        if transposed:
            local = local.mT.contiguous().mT
        with CommLog() as log:
            expected = _redistribute.redistribute_local_tensor(local, src, dst)
        with CommLog() as our_log:
            actual = plan.apply(local)
        assert our_log.calls == log.calls, (source, target)
        assert_same(
            Outcome(tensor=actual, is_input=actual is local),
            Outcome(tensor=expected, is_input=expected is local),
            f"{source} to {target} of {shape}",
            values=True,
        )


@pytest.mark.ranks
@pytest.mark.parametrize(
    "shape",
    [
        (6, 12, 3),
        (0, 6),
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((12, 6), (6, 6, 1, 2))),
    ],
    ids=str,
)
def test_strided_shards_with_equal_pieces(shape):
    run_ranks(compare_strided, 2, shape, timeout=120)


def compare_on_one_axis(shapes, dtype):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    every_layout = dtype is torch.float32 and mesh.size() == 2
    return compare(mesh, ONE_AXIS, shapes, dtype, values=True, every_layout=every_layout)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_on_one_axis(world_size):
    assert min(run_ranks(compare_on_one_axis, world_size, SHAPES, torch.float32, timeout=300)) > 200


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_other_dtypes(dtype):
    assert min(run_ranks(compare_on_one_axis, 2, [(8, 4), (5, 7)], dtype, timeout=120)) > 20


def compare_on_two_axes(shape):
    mesh = init_device_mesh("cpu", (2, 2))
    return compare(mesh, TWO_AXES, [shape], values=True)


def compare_many_elements():
    mesh = init_device_mesh("cpu", (2,))
    pairs = [((old,), (new,)) for old in (R, SUM, S0, S1, S2) for new in (R, S0, S1, S2)]
    return compare(mesh, pairs, [(4, 6, 6000), (3, 5, 9001)], values=True)


@pytest.mark.ranks
def test_values_of_tensors_that_are_joined_and_cut_another_way_for_their_size():
    """Of more than `kFewElements` (redistribute.cpp), on every rank."""
    assert min(run_ranks(compare_many_elements, 2, timeout=120)) == 40


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 4), (5, 7)], ids=str)
def test_values_on_two_axes(shape):
    assert min(run_ranks(compare_on_two_axes, 4, shape, timeout=300)) > 300


def compare_on_merged_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh._flatten("ab")
    placements = [(R, R), (SUM, SUM), (AVG, AVG), (SUM, AVG), (S0, S0), (S1, S1), (MAX, MAX)]
    pairs = [
        pair for pair in pairs_of(placements) if pair[1][0] in (R, S0, S1) or pair[0] == (R, R)
    ]
    # torch's merged gathers of unequal shards are wrong: test_gathers.py.
    reductions = [pair for pair in pairs if not isinstance(pair[0][0], Shard)]
    even = compare(mesh, pairs, [(8, 4)], values=True)
    return even, compare(mesh, reductions, [(5, 7)], values=True)


@pytest.mark.ranks
def test_collectives_over_several_axes_are_merged_where_torch_merges_them():
    assert set(run_ranks(compare_on_merged_axes, 4, timeout=120)) == {(25, 19)}


def ordered_specs(mesh, whole):
    """Specs whose shards are in another order than the mesh's axes."""
    reverse = (ShardOrderEntry(0, (1, 0)),)
    return {
        "replicate": spec(mesh, (R, R), whole),
        "sum": spec(mesh, (SUM, SUM), whole),
        "default order": spec(mesh, (S0, S0), whole),
        "reverse order": spec(mesh, (S0, S0), whole, shard_order=reverse),
        "reverse order, dim 1": spec(
            mesh, (S1, S1), whole, shard_order=(ShardOrderEntry(1, (1, 0)),)
        ),
        "strided": spec(mesh, (_StridedShard(0, split_factor=2), S0), whole),
        "dim 0 and 1": spec(mesh, (S0, S1), whole),
        "no order": spec(mesh, (_StridedShard(0, split_factor=3), R), whole, **NO_ORDER),
    }


def compare_orders(shape):
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    specs = ordered_specs(mesh, whole)
    left = []
    for (source, src), (target, dst) in itertools.permutations(specs.items(), 2):
        local = whole
        if source not in ("sum", "replicate"):
            local = _redistribute.redistribute_local_tensor(whole, specs["replicate"], src)
        plan = plan_redistribution(src, dst)
        if plan is None:
            left.append((source, target))
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                _redistribute.redistribute_local_tensor(local, src, dst)
            continue
        with CommLog() as log:
            expected = _redistribute.redistribute_local_tensor(local, src, dst)
        with CommLog() as our_log:
            actual = plan.apply(local)
        if merges_gathers(plan):
            assert len(our_log.calls) < len(log.calls), (source, target)
        else:
            assert our_log.calls == log.calls, (source, target)
        assert_same(
            Outcome(tensor=actual), Outcome(tensor=expected), f"{source} to {target}", values=True
        )
    return left


@pytest.mark.ranks
@pytest.mark.parametrize("shape", [pytest.param((8, 4), marks=pytest.mark.slow), (5, 7)], ids=str)
def test_shard_orders_and_strided_shards(shape):
    for left in run_ranks(compare_orders, 4, shape, timeout=120):
        into_sum = {("default order", "sum"), ("dim 0 and 1", "sum")}
        if _compat.RELEASE >= (2, 14):  # torch fills these with zeros too, and gathered them before
            others = ("reverse order", "reverse order, dim 1", "strided")
            into_sum |= {(source, "sum") for source in others}
        no_order = {pair for pair in itertools.permutations(ORDERED, 2) if "no order" in pair}
        assert set(left) == into_sum | no_order


ORDERED = (
    "replicate",
    "sum",
    "default order",
    "reverse order",
    "reverse order, dim 1",
    "strided",
    "dim 0 and 1",
    "no order",
)
