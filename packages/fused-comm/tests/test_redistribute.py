"""Redistributing many tensors: the values of `DTensor.redistribute`, in fewer collectives."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fused_comm import all_gather_many, all_reduce_many, redistribute_many, reduce_scatter_many
from testkit import CommLog, fake_mesh, run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
SHAPES = [(8, 4), (5, 3), (1, 6), (3, 2, 2)]


def tensors(mesh, placements, shapes=SHAPES, requires_grad=False):
    """Partial tensors of different values on each rank; otherwise shards of common tensors."""
    found = []
    for number, shape in enumerate(shapes):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * number
        shards = [R if isinstance(p, Partial) else p for p in placements]
        local = distribute_tensor(whole, mesh, shards).to_local()
        if shards != list(placements):
            local = local + dist.get_rank()
        one = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        found.append(one.requires_grad_(requires_grad))
    return found


def same(actual, expected):
    return all(
        a.placements == b.placements
        and a.shape == b.shape
        and a.stride() == b.stride()
        and torch.equal(a.to_local(), b.to_local())
        for a, b in zip(actual, expected, strict=True)
    )


@pytest.mark.ranks
def test_two_ranks_get_the_results_of_dtensor_redistribute():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        wrong = []
        for source, target in itertools.product([R, P, S0, S1, Partial("avg")], [R, S0, S1]):
            given = tensors(mesh, [source])
            actual = redistribute_many(given, [target])
            if not same(actual, [t.redistribute(placements=[target]) for t in given]):
                wrong.append((source, target))
        return wrong

    assert run_ranks(check, 2) == [[]] * 2


@pytest.mark.ranks
def test_four_ranks_get_the_results_of_dtensor_redistribute_on_two_axes():
    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        wrong = []
        each = [R, P, S0, S1]
        for source in itertools.product(each, each):
            targets = ([R, S0, S1] + [P] * (one == P) for one in source)
            for target in itertools.product(*targets):
                given = tensors(mesh, source)
                actual = redistribute_many(given, target)
                if not same(actual, [t.redistribute(placements=target) for t in given]):
                    wrong.append((source, target))
        return wrong

    assert run_ranks(check, 4, timeout=200) == [[]] * 4


COUNTS = [
    ((P, P), (R, R), {"all_reduce": 1}),
    ((P, P), (R, S0), {"all_reduce": 1, "reduce_scatter": 1}),
    ((P, P), (S0, S1), {"reduce_scatter": 1}),
    ((S0, S0), (R, R), {"all_gather": 1}),
    ((S0, S1), (R, R), {"all_gather": 1}),
    ((S0, R), (S1, R), {"all_to_all": 1}),
    ((R, R), (S0, S1), {}),
]


@pytest.mark.parametrize(("source", "target", "expected"), COUNTS)
def test_tensors_with_the_same_redistribution_share_a_collective(source, target, expected):
    with fake_mesh((2, 2)) as mesh:
        given = tensors(mesh, source)
        redistribute_many(given, target)  # makes groups
        with CommLog() as log:
            redistribute_many(given, target)
        assert log.counts() == expected


def test_each_may_have_its_own_placements_and_dtype():
    with fake_mesh((2,)) as mesh:
        given = [*tensors(mesh, [P]), *tensors(mesh, [S0])]
        wide = [t.to(torch.float64) for t in tensors(mesh, [P])]
        targets = [[R]] * 4 + [[R]] * 4 + [[R]] * 4
        with CommLog() as log:
            results = redistribute_many([*given, *wide], targets)
        assert log.counts() == {"all_reduce": 2, "all_gather": 1}
        assert [r.dtype for r in results] == [torch.float32] * 8 + [torch.float64] * 4


@pytest.mark.ranks
@pytest.mark.parametrize(("source", "target"), [(S0, R), (P, S0), (P, R), (R, S0), (S0, S1)])
def test_gradients_are_redistributed_together(source, target):
    def check():
        mesh = init_device_mesh("cpu", (2,))
        actual, expected = (tensors(mesh, [source], requires_grad=True) for _ in range(2))
        weights = tensors(mesh, [target])
        results = redistribute_many(actual, [target])
        sum((r * w).sum() for r, w in zip(results, weights, strict=True)).backward()
        for one, weight in zip(expected, weights, strict=True):
            (one.redistribute(placements=[target]) * weight).sum().backward()
        return same([t.grad for t in actual], [t.grad for t in expected])

    assert run_ranks(check, 2) == [True] * 2


@pytest.mark.ranks
def test_async_results_are_returned_by_wait():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        given, native = (tensors(mesh, [S0], requires_grad=True) for _ in range(2))
        pending = redistribute_many(given, [R], async_op=True)
        results = pending.wait()
        expected = [t.redistribute(placements=[R]) for t in native]
        for each in (results, expected):
            sum(r.sum() for r in each).backward()
        return (
            results is pending.wait(),
            same(results, expected),
            # Sharded evenly; torch 2.11 accumulates the gradients of uneven shards replicated.
            given[0].grad.placements == (S0,),
            same([t.grad for t in given], [t.grad for t in native]),
        )

    assert run_ranks(check, 2) == [(True, True, True, True)] * 2


@pytest.mark.ranks
def test_the_named_collectives():
    def check():
        mesh = init_device_mesh("cpu", (2, 1))
        shards, sums = tensors(mesh, [S0, R]), tensors(mesh, [P, R], [(4, 4), (6, 3)])
        return (
            same(all_gather_many(shards), [t.redistribute(placements=[R, R]) for t in shards]),
            same(all_reduce_many(sums), [t.redistribute(placements=[R, R]) for t in sums]),
            same(reduce_scatter_many(sums), [t.redistribute(placements=[S0, R]) for t in sums]),
            same(
                reduce_scatter_many(sums, [1, 0]),
                [
                    sums[0].redistribute(placements=[S1, R]),
                    sums[1].redistribute(placements=[S0, R]),
                ],
            ),
        )

    assert run_ranks(check, 2) == [(True,) * 4] * 2


def test_wrong_numbers_of_placements_and_dims_are_refused():
    with fake_mesh((2,)) as mesh:
        given = tensors(mesh, [P])
        with pytest.raises(ValueError, match="placements for 4 tensors, got 2"):
            redistribute_many(given, [[R], [R]])
        with pytest.raises(ValueError, match=r"one placement per axis of .* for tensor 0"):
            redistribute_many(given, [R, R])
        with pytest.raises(ValueError, match="4 tensors, got 2 dims"):
            reduce_scatter_many(given, [0, 1])
        with pytest.raises(ValueError, match=r"all_gather_many: expected Shard .* for tensor 0"):
            all_gather_many(given)


def test_no_tensors_make_no_results():
    assert redistribute_many([], [R]) == []


def test_dims_may_be_numpy_integers():
    with fake_mesh((2,)) as mesh:
        sums = [DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]) for _ in range(2)]
        for dims in (np.int64(1), [np.int64(1), 1]):
            assert [one.placements for one in reduce_scatter_many(sums, dims)] == [(Shard(1),)] * 2
