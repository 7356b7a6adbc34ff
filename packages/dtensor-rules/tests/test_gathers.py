"""Gathers over several mesh axes at once: how many are sent, and where their elements belong."""

import itertools
import math
from contextlib import nullcontext
from functools import partial

import hypothesis.strategies as draw
import pytest
import torch
from hypothesis import assume, given
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _redistribute,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._debug_mode import DebugMode
from torch.utils.flop_counter import FlopCounterMode

import dtensor_rules
from dtensor_rules._core import MultiAxisGather
from dtensor_rules.gathers import Transforms, _Blocks, merge_transforms
from dtensor_rules.redistribution import plan_redistribution
from testkit import CommLog, assert_bitwise, each_rank, fake_mesh, run_ranks

R, S0, S1, S2, SUM = Replicate(), Shard(0), Shard(1), Shard(2), Partial()


def spec(mesh, placements, shape, **kwargs):
    whole = torch.zeros(shape)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensorSpec(mesh, tuple(placements), meta, **kwargs)


def steps(mesh, source, target, shape, **kwargs):
    """What each step is, and on how many ranks."""
    plan = plan_redistribution(spec(mesh, source, shape, **kwargs), spec(mesh, target, shape))
    return [(type(step).__name__, repr(step).rpartition("axis=")[2][:-1]) for step in plan.steps]


# Where their elements belong.


@draw.composite
def cuts(draws):
    """How mesh axes cut a tensor: their sizes, and (axis, dim, parts) of each cut in turn."""
    sizes = draws(draw.lists(draw.integers(2, 3), min_size=2, max_size=4))
    dims = draws(draw.integers(1, 3))
    axes = draws(draw.permutations(range(len(sizes))))
    return (
        sizes,
        dims,
        [
            (axis, draws(draw.integers(0, dims - 1)), draws(draw.sampled_from([1, 1, 2, 3, 4])))
            for axis in axes
        ],
    )


def cut(tensor, dim, parts, count, rank):
    """A rank's shard: every `count`-th piece of a dim of `parts` times `count` pieces."""
    pieces = tensor.chunk(parts * count, dim)
    assert len(pieces) == parts * count
    return torch.cat(pieces[rank::count], dim)


@given(cuts())
def test_blocks_put_every_element_where_it_was(drawn):
    sizes, dims, cut_by = drawn
    shape = [1 + dim for dim in range(dims)]  # of the smallest pieces
    for axis, dim, parts in cut_by:
        shape[dim] *= sizes[axis] * parts
    assume(math.prod(shape) < 50_000)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    shards = []
    for coordinate in itertools.product(*map(range, sizes)):
        shard = whole
        for axis, dim, parts in cut_by:
            shard = cut(shard, dim, parts, sizes[axis], coordinate[axis])
        shards.append(shard)
    blocks = _Blocks.of_shards(sizes, list(shards[0].shape))
    # The axis that cut last is gathered first.
    if not all(blocks.gather(axis, dim, parts) for axis, dim, parts in reversed(cut_by)):
        assert any(parts > 1 for *_, parts in cut_by)
        assume(False)
    gathered = torch.stack(shards).reshape([block.size for block in blocks.in_memory])
    assert_bitwise(gathered.permute(blocks.order()).reshape(shape), whole, repr(drawn))


def test_parts_that_are_no_whole_number_of_blocks_are_refused():
    blocks = _Blocks.of_shards([3, 2], [4])
    assert blocks.gather(0, 0, 1)  # of 3 x 4
    assert not blocks.gather(1, 0, 2)


# How many are sent.


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ((S0, S0, S0), (8, 4)),
        ((S0, S1, S2), (4, 6, 2)),
        ((S1, S0, S1), (6, 8)),
        ((_StridedShard(0, split_factor=2), S0, S1), (4, 4)),  # the second axis cuts first
    ],
    ids=str,
)
def test_three_axes_are_gathered_at_once_over_the_default_group(source, shape):
    with fake_mesh((2, 2, 2), rank=5) as mesh:
        assert steps(mesh, source, (R, R, R), shape) == [("MultiAxisGather", "8")]


def test_axes_of_one_rank_are_passed_over():
    with fake_mesh((2, 1, 2), rank=3) as mesh:
        assert steps(mesh, (S0, S0, S1), (R, R, R), (4, 4)) == [("MultiAxisGather", "4")]


def test_axes_of_one_rank_need_not_be_flattened():
    with fake_mesh((2, 2)):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
        turned = DeviceMesh("cpu", mesh.mesh.permute(2, 1, 0), mesh_dim_names=("c", "b", "a"))
        turned["c", "a"]._flatten()
        assert steps(turned, (S1, S0, S0), (R, R, R), (4, 4)) == [("MultiAxisGather", "4")]
        mesh["b", "c"]._flatten()
        assert steps(mesh, (R, S0, S1), (R, R, R), (4, 4)) == [("AllGather", "2")]


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (16, 1),
        (4, 2),  # four pieces of one for eight places
        (10, 2),  # five pieces of two: one rank has six elements, the other four
    ],
)
def test_strided_shards_are_gathered_at_once_where_their_pieces_are_equal(size, count):
    strided = _StridedShard(0, split_factor=4)
    with fake_mesh((2, 2)) as mesh:
        transforms = [
            _redistribute._TransformInfo(1, (S1, R), [size // 2, 4]),
            _redistribute._TransformInfo(0, (strided, R), [size, 4]),
        ]
        transforms = Transforms(transforms, (size, 4))
        merged = merge_transforms(transforms, mesh, (strided, S1), (R, R))
        assert len(merged) == count
        assert (merged == transforms) is (count == 2)


@pytest.mark.parametrize(("size", "count"), [(8, 2), (12, 3)])
def test_a_shard_that_is_made_between_gathers_counts(size, count):
    """After the first transform three axes shard dim 1, into unequal shards where it has 12."""
    with fake_mesh((2, 2, 2)):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        mesh["b", "c"]._flatten()
        transforms = [
            _redistribute._TransformInfo(axis, placements, shape)
            for axis, placements, shape in (
                (0, (S0, S1), [8, size]),
                (2, (S1, R), [8, size // 4]),
                (1, (S1, R), [8, size // 2]),
            )
        ]
        merged = merge_transforms(Transforms(transforms, (8, size)), mesh, (S0, S1, S1), (S1, R, R))
        assert len(merged) == count


def test_what_comes_between_gathers_keeps_its_place():
    with fake_mesh((2, 2, 2)) as mesh:
        assert steps(mesh, (S0, SUM, S1), (R, R, R), (4, 4)) == [
            ("AllGather", "2"),
            ("AllReduce", "2"),
            ("AllGather", "2"),
        ]


def test_two_of_three_axes_are_gathered_at_once_where_they_are_flattened():
    with fake_mesh((2, 2, 2)):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        two = [("AllGather", "2")] * 2
        assert steps(mesh, (R, S0, S1), (R, R, R), (4, 4)) == two
        assert steps(mesh, (S0, R, S1), (R, R, R), (4, 4)) == two
        mesh["b", "c"]._flatten()
        mesh["a", "c"]._flatten()
        one = [("MultiAxisGather", "4")]
        assert steps(mesh, (R, S0, S1), (R, R, R), (4, 4)) == one
        assert steps(mesh, (S0, R, S1), (R, R, R), (4, 4)) == one
        assert steps(mesh, (S2, S0, S1), (S2, R, R), (4, 4, 4)) == one
        assert steps(mesh, (S0, S1, R), (R, R, R), (4, 4)) == two


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 4), [("MultiAxisGather", "4")]),
        ((6, 4), [("AllGather", "2")] * 2),  # of some ranks two, of others one
    ],
)
def test_a_dim_that_stays_sharded_is_gathered_at_once_where_shards_are_equal(shape, expected):
    with fake_mesh((2, 2, 2)):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        mesh["b", "c"]._flatten()
        assert steps(mesh, (S0, S0, S1), (S0, R, R), shape) == expected


def test_transforms_without_the_shape_of_the_tensor_are_merged_as_torch_does():
    """They come from a caller that did not get them from torch's function, which is wrapped."""
    with fake_mesh((2, 2)) as mesh:
        transforms = [
            _redistribute._TransformInfo(1, (S1, R), [4, 4]),
            _redistribute._TransformInfo(0, (S0, R), [4, 4]),
        ]
        assert merge_transforms(transforms, mesh, (S0, S1), (R, R)) == transforms


def test_as_many_as_have_a_group_are_gathered_at_once():
    with fake_mesh((2, 2, 2)):
        world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        turned = DeviceMesh("cpu", world.mesh.permute(2, 1, 0), mesh_dim_names=("c", "b", "a"))
        apart = [("AllGather", "2")] * 3
        assert steps(turned, (S0, S1, S2), (R, R, R), (4, 4, 4)) == apart
        turned["b", "a"]._flatten()
        expected = [("MultiAxisGather", "4"), ("AllGather", "2")]
        assert steps(turned, (S0, S1, S2), (R, R, R), (4, 4, 4)) == expected
        assert steps(turned, (S0, S1, S0), (R, R, R), (8, 4)) == expected
        assert steps(turned, (S0, S1, S0), (R, R, R), (6, 4)) == apart
        turned["c", "b"]._flatten()
        expected.reverse()  # when a is gathered, c leaves three elements to every rank
        assert steps(turned, (S0, S1, S0), (R, R, R), (6, 4)) == expected


def test_the_sub_mesh_of_a_world_has_no_default_group():
    with fake_mesh((2, 2, 2)):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        assert steps(mesh["b", "c"], (S0, S1), (R, R), (4, 4)) == [("AllGather", "2")] * 2


def test_torch_s_flag_against_merging_is_heeded():
    with fake_mesh((2, 2)) as mesh, _redistribute.disable_redistribute_transform_optimization():
        assert steps(mesh, (S0, S1), (R, R), (4, 4)) == [("AllGather", "2")] * 2


def test_every_rank_comes_to_the_same_decision():
    """Of shards that are not equal, each rank sees another: none may merge what others do not."""
    table = list(itertools.product((R, S0, S1), repeat=3))
    shapes = [(8, 8), (5, 8), (6, 4), (3, 7)]
    decisions = [
        [steps(mesh, source, (R, R, R), shape) for source in table for shape in shapes]
        for _, mesh in each_rank((2, 2, 2))
    ]
    assert all(decision == decisions[0] for decision in decisions)
    names = {name for decision in decisions[0] for name, _ in decision}
    assert names == {"AllGather", "MultiAxisGather"}


def test_a_shard_that_belies_its_spec_is_noticed():
    with fake_mesh((2, 2)) as mesh:
        plan = plan_redistribution(spec(mesh, (S0, S1), (4, 4)), spec(mesh, (R, R), (4, 4)))
        with pytest.raises(RuntimeError, match="a shard of dim 1 has size 3 where the spec says 2"):
            plan.apply(torch.zeros(2, 3))


# On gloo ranks.

SOURCES = list(itertools.product((S0, S1, S2), repeat=2))


def gather_everything():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(8.0 * 4 * 12).reshape(8, 4, 12)
    sent = 0
    reverse = {"shard_order": (ShardOrderEntry(0, (1, 0)),)}
    for source, order in [*((pair, {}) for pair in SOURCES), ((S0, S0), reverse)]:
        src, dst = spec(mesh, source, whole.shape, **order), spec(mesh, (R, R), whole.shape)
        plan = plan_redistribution(src, dst)
        assert [type(step) for step in plan.steps] == [MultiAxisGather], source
        local = _redistribute.redistribute_local_tensor(whole, dst, src)
        for layout in (local, local.mT.contiguous().mT):
            with CommLog() as log:
                assert_bitwise(plan.apply(layout), whole, f"{source} {order}")
            sent += len(log.calls)
    return sent


@pytest.mark.ranks
def test_the_tensor_is_whole_again():
    assert set(run_ranks(gather_everything, 4, timeout=120)) == {2 * (len(SOURCES) + 1)}


def full_tensor_and_gradient():
    """The first call is torch's, the second planned; a mode on one rank makes it torch's again."""
    dtensor_rules.disable()  # tests before this one may have left it on in these processes
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(32.0).reshape(8, 4)
    counts = []
    distribute_tensor(whole, mesh, [S1, S0]).full_tensor()  # torch remembers its own transforms
    with dtensor_rules.enabled():
        for mode in (nullcontext, nullcontext, partial(FlopCounterMode, display=False), DebugMode):
            x = distribute_tensor(whole, mesh, [S1, S0]).requires_grad_()
            on_one_rank = mode() if mesh.get_rank() == 1 else nullcontext()
            with CommLog() as log, on_one_rank:
                full = x.full_tensor()
                (full * whole).sum().backward()
            counts.append(log.counts())
            assert_bitwise(full.detach(), whole, f"full_tensor under {mode}")
            assert isinstance(x.grad, DTensor)
            assert_bitwise(x.grad.full_tensor(), whole, f"gradient under {mode}")
    assert counts == [{"all_gather": 1}] * 4
    with CommLog() as log:
        x.full_tensor()
    log.assert_counts({"all_gather": 2})  # torch has its own function again


@pytest.mark.ranks
def test_full_tensor_gathers_once_whoever_carries_it_out():
    run_ranks(full_tensor_and_gradient, 4, timeout=120)


def flatten_after_a_step():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    turned = DeviceMesh("cpu", mesh.mesh.permute(2, 1, 0), mesh_dim_names=("c", "b", "a"))
    x = distribute_tensor(torch.arange(32.0).reshape(8, 4), turned, [S1, R, S0])
    counts = []
    with dtensor_rules.enabled():
        for flatten in (False, False, True, False):
            if flatten:
                turned["c", "a"]._flatten()
            with CommLog() as log:
                x.redistribute(placements=[R, R, R])
            counts.append(log.counts()["all_gather"])
    return counts


@pytest.mark.ranks
def test_a_mesh_that_is_flattened_late_is_used_from_there_on():
    for counts in run_ranks(flatten_after_a_step, 4, timeout=120):
        assert counts == [2, 2, 1, 1]


def gather_on_three_axes():
    """Every pair of placements on three axes of which two or three are gathered."""
    dtensor_rules.disable()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    for axes in itertools.combinations("abc", 2):
        mesh[axes]._flatten()
    whole = torch.arange(8.0 * 24).reshape(8, 24)
    merged = 0
    for source in itertools.product((S0, S1), repeat=3):
        x = distribute_tensor(whole, mesh, source)
        for stays in ((), (0,), (1,), (2,)):
            target = [source[axis] if axis in stays else R for axis in range(3)]
            expected = x.redistribute(placements=target).to_local()
            with dtensor_rules.enabled():
                for who in ("torch, wrapped", "this package"):
                    with CommLog() as log:
                        actual = x.redistribute(placements=target).to_local()
                    assert_bitwise(actual, expected, f"{source} to {target} by {who}")
                    merged += sum(log.counts().values()) == 1
    return merged


@pytest.mark.ranks
@pytest.mark.slow
def test_gathers_on_three_axes_give_torch_s_bits():
    [count] = set(run_ranks(gather_on_three_axes, 8, timeout=300))
    assert count == 8 * 4 * 2  # each pair, by torch and by this package


def gather_unequal_shards():
    """What torch and what we make of a dim of 5 on 2 x 2 ranks, the mesh flattened."""
    dtensor_rules.disable()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(5.0)
    src, dst = spec(mesh, (S0, S0), whole.shape), spec(mesh, (R, R), whole.shape)
    local = _redistribute.redistribute_local_tensor(whole, dst, src)
    mesh._flatten()
    expected = _redistribute.redistribute_local_tensor(local, src, dst)
    return expected.tolist(), plan_redistribution(src, dst).apply(local).tolist()


@pytest.mark.ranks
def test_unequal_shards_are_gathered_axis_by_axis_for_torch_s_one_gather_is_wrong():
    """Where torch's becomes right, one may be sent for these too."""
    for expected, actual in run_ranks(gather_unequal_shards, 4, timeout=120):
        assert actual == [0, 1, 2, 3, 4]
        assert expected != actual
