"""The rules that are there from the start: what they skip, and that nothing else changes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

import dtensor_rules
from dtensor_rules import _compat
from testkit import CommLog, assert_bitwise, fake_mesh, run_ranks


def hits(name):
    return {listed.rule.name: listed.hits for listed in dtensor_rules.rules()}[name]


@pytest.fixture
def mesh():
    with fake_mesh((4,)) as mesh, dtensor_rules.enabled():
        yield mesh


@pytest.fixture
def no_fake_tensors(monkeypatch):
    """Running an operator on fake tensors, which the rules are there to avoid, fails."""

    def forbidden(self, schema):
        raise AssertionError(f"{schema.op} was run on fake tensors")

    monkeypatch.setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", forbidden)


def tensor(mesh, *placements, shape=(8, 8)):
    numel = torch.Size(shape).numel()
    return distribute_tensor(torch.arange(float(numel)).reshape(shape), mesh, list(placements))


def equal_on_ranks():
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    with dtensor_rules.enabled():
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        y = distribute_tensor(torch.tensor([0.0, 1, 2, 9]), mesh, [Shard(0)])  # rank 1's differs
        before = hits("equal")
        dtensor_rules.stats_clear()
        assert torch.equal(x, x)
        assert not torch.equal(x, y)
        dtensor_rules.cache_clear()  # asked when the plan is new, and when it is known
        for _ in range(2):
            assert not torch.equal(x, y)
        with CommLog() as log:
            assert not torch.equal(x, y)
        log.assert_counts({"all_reduce": 1})
        whole = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
        with CommLog() as log:
            assert torch.equal(whole, whole)
            assert not torch.equal(whole, whole + 1)
        log.assert_counts({})
        assert not torch.equal(x, distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))
        assert hits("equal") == before + 8
        mixed = torch.equal(x, whole)  # of different placements: torch's
        assert mixed
        assert dtensor_rules.stats()["aten.equal.default"].fallthrough == {"unsupported": 1}
    return rank


@pytest.mark.ranks
def test_equal_asks_the_other_ranks_only_where_they_hold_others():
    assert run_ranks(equal_on_ranks, 2) == [0, 1]


def test_equal_on_part_of_the_world_is_torchs(mesh):
    part = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.ones(4), part, [Shard(0), Replicate()])
    before = hits("equal")
    assert torch.equal(x, x)
    assert hits("equal") == before + 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y, out: x.add_(y),
        lambda x, y, out: x.mul_(2.0),
        lambda x, y, out: torch._foreach_add_([x, x], [y, y]),
        lambda x, y, out: torch.add(x, y, out=out),
    ],
    ids=["add_", "mul_ by a number", "foreach", "out="],
)
def test_the_tensor_that_is_written_says_what_the_result_is(mesh, no_fake_tensors, call):
    x, y, out = (tensor(mesh, Shard(0)) for _ in range(3))
    before = hits("out-given")
    call(x, y, out)
    assert hits("out-given") == before + 1


def test_an_empty_out_gets_its_shape_from_torch(mesh):
    x = tensor(mesh, Shard(0))
    out = tensor(mesh, Shard(0), shape=(0, 8))
    before = hits("out-given")
    torch.neg(x, out=out)
    assert hits("out-given") == before
    assert out._spec.shape == (8, 8)
    assert_bitwise(out.to_local(), -x.to_local())


def test_inplace_views_are_torchs(mesh):
    x = tensor(mesh, Shard(1), shape=(1, 8))
    before = hits("out-given")
    x.squeeze_(0)
    assert hits("out-given") == before
    assert x.placements == (Shard(0),)


@pytest.mark.parametrize(
    ("op", "shapes", "dims"),
    [(torch.mm, ((8, 16), (16, 4)), (1, 0)), (torch.bmm, ((2, 8, 16), (2, 16, 4)), (2, 1))],
    ids=["mm", "bmm"],
)
def test_a_partial_result_has_the_shape_of_the_local_one(mesh, no_fake_tensors, op, shapes, dims):
    left, right = (
        tensor(mesh, Shard(dim), shape=shape) for dim, shape in zip(dims, shapes, strict=True)
    )
    before = hits("out-partial")
    for _ in range(2):
        result = op(left, right)
        assert result.placements == (Partial(),)
        assert result.shape == (*shapes[0][:-1], 4)
        assert result.stride() == result.to_local().stride()
        assert_bitwise(result.to_local(), op(left.to_local(), right.to_local()))
    assert hits("out-partial") == before + 2


def test_factors_that_do_not_fit_raise_as_torch_raises(mesh):
    left, right = tensor(mesh, Shard(1), shape=(8, 16)), tensor(mesh, Shard(0), shape=(12, 4))
    with pytest.raises(RuntimeError, match="Sharding propagation failed"):
        torch.mm(left, right)


def partial_plus_replicate(world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    rank = dist.get_rank()
    parts = torch.tensor([0.1, 0.2, 0.3]) * (rank + 1)
    whole = torch.tensor([1 / 3, 7.0, 0.01])
    partial = DTensor.from_local(parts, mesh, [Partial()])
    replica = DTensor.from_local(whole, mesh, [Replicate()])
    with dtensor_rules.enabled():
        before = hits("partial + replicate"), hits("replicate + partial")
        with CommLog() as log:
            results = [partial + replica, torch.add(partial, replica, alpha=2)]
            if _compat.partial_second_stays():
                results.append(replica + partial)
        log.assert_counts({})
        assert hits("partial + replicate") == before[0] + 2
        assert hits("replicate + partial") == before[1] + len(results) - 2
    for result, alpha in zip(results, (1, 2, 1), strict=False):
        assert result.placements == (Partial(),)
        assert_bitwise(result.to_local(), parts + alpha * whole if rank == 0 else parts)
    return [result.full_tensor() for result in results]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_replica_is_added_to_a_partial_sum_on_one_rank_only(world_size):
    weight = sum(range(1, world_size + 1))
    total = torch.tensor([0.1, 0.2, 0.3]) * weight + torch.tensor([1 / 3, 7.0, 0.01])
    for results in run_ranks(partial_plus_replicate, world_size, world_size):
        torch.testing.assert_close(results[0], total)
        for other_way_round in results[2:]:
            assert_bitwise(results[0], other_way_round)


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ((Partial(), Replicate()), (Replicate(), Replicate()), (Partial(), Replicate())),
        ((Partial(), Shard(0)), (Replicate(), Shard(0)), (Partial(), Shard(0))),
        pytest.param(
            (Partial(), Replicate()),
            (Replicate(), Partial()),
            (Partial(), Partial()),
            marks=pytest.mark.skipif(
                not _compat.partial_second_stays(),
                reason="2.11 reduces a partial sum that is added to a replica",
            ),
        ),
        ((Partial(), Partial()), (Replicate(), Partial()), (Partial(), Partial())),
    ],
    ids=str,
)
def test_other_axes_may_be_anything_that_adds_up(left, right, result):
    for rank in range(4):
        with fake_mesh((2, 2), rank=rank) as mesh, dtensor_rules.enabled():
            x, y = (
                DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False)
                for placements in (left, right)
            )
            total = x + y
            assert total.placements == result
            counts = [
                all(
                    mesh.get_local_rank(axis) == 0
                    for axis in range(2)
                    if isinstance(own[axis], Replicate) and isinstance(other[axis], Partial)
                )
                for own, other in ((left, right), (right, left))
            ]
            assert_bitwise(total.to_local(), torch.full((2, 2), float(sum(counts))))


@pytest.mark.parametrize(
    ("left", "right", "right_shape"),
    [((Partial("max"),), (Replicate(),), (8, 2)), ((Partial(),), (Shard(0),), (2, 2))],
    ids=str,
)
def test_other_pairs_are_torchs_to_add(mesh, left, right, right_shape):
    x, y = (
        DTensor.from_local(torch.ones(shape), mesh, placements, run_check=False)
        for placements, shape in ((left, (8, 2)), (right, right_shape))
    )
    before = hits("partial + replicate")
    assert (x + y).shape == (8, 2)
    assert hits("partial + replicate") == before
