"""Costs of redistributions are torch's, to the last bit, without torch's specs and searches."""

import itertools
import random

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from dtensor_rules.planning.costs import CostModel
from dtensor_rules.planning.path_search import NoPathError
from dtensor_rules.planning.step_times import Codebook, Topology
from testkit import fake_mesh
from testkit.mesh import clear_redistribution_caches

R, P, AVG, S0, S1 = Replicate(), Partial(), Partial("avg"), Shard(0), Shard(1)
STRIDED = _StridedShard(0, split_factor=2)
META = TensorMeta(torch.Size((16, 24)), (24, 1), torch.float32)


@pytest.fixture(autouse=True)
def no_cached_plans():
    """Torch's answers depend on what it was asked before: its planners keep earlier targets."""
    clear_redistribution_caches()
    yield
    clear_redistribution_caches()


def spec(mesh, placements, **options):
    return DTensorSpec(mesh, tuple(placements), tensor_meta=META, **options)


def of_torch(source, target):
    clear_redistribution_caches()
    try:
        return redistribute_cost(source, target)
    except AssertionError:
        return NoPathError


def of_model(model, book, placements, strided_is_order=None):
    try:
        return model.cost(book.codes(placements), strided_is_order)
    except NoPathError:
        return NoPathError


def check(mesh, source, targets, strided_is_order=None):
    """Compares the costs of all targets from one source, asked of one model in their order."""
    book = Codebook()
    model = CostModel(source, book, Topology(mesh))
    for target in targets:
        flag = strided_is_order if STRIDED in target else None
        expected = of_torch(source, spec(mesh, target, use_strided_shard_as_shard_order=flag))
        got = of_model(model, book, target, strided_is_order)
        assert got == expected, f"from {source} to {target}"


@pytest.mark.parametrize("shape", [(4,), (2, 4), (4, 1)])
def test_every_pair_of_plain_placements(shape):
    with fake_mesh(shape) as mesh:
        every = list(itertools.product([R, P, AVG, S0, S1], repeat=len(shape)))
        for source in every:
            check(mesh, spec(mesh, source), every)


@pytest.mark.parametrize("strided_is_order", [True, False], ids=["order", "view"])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_pairs_with_strided_shards(shape, strided_is_order):
    draw = random.Random(0)
    with fake_mesh(shape) as mesh:
        every = list(itertools.product([R, P, S0, S1, STRIDED], repeat=len(shape)))
        for source in every:
            flag = (
                {"use_strided_shard_as_shard_order": strided_is_order} if STRIDED in source else {}
            )
            targets = draw.sample(every, k=min(8, len(every)))
            check(mesh, spec(mesh, source, **flag), targets, strided_is_order)


def test_three_axes():
    draw = random.Random(0)
    with fake_mesh((2, 2, 2)) as mesh:
        every = list(itertools.product([R, P, S0, S1], repeat=3))
        for source in every:
            check(mesh, spec(mesh, source), draw.sample(every, k=12))


def test_shards_in_another_order_than_the_axes_are_searched_for():
    with fake_mesh((2, 4)) as mesh:
        turned = spec(mesh, (S0, S0), shard_order=(ShardOrderEntry(0, (1, 0)),))
        every = list(itertools.product([R, P, S0, S1], repeat=2))
        check(mesh, turned, every)
        in_order = CostModel(spec(mesh, (S0, S0)), (book := Codebook()), Topology(mesh))
        assert of_model(in_order, book, (S0, S0)) == 0.0
        assert CostModel(turned, book, Topology(mesh)).cost(book.codes((S0, S0)), None) > 0.0


def test_torch_may_be_told_to_search_always():
    with fake_mesh((2, 4)) as mesh, use_min_cost_redistribution_plan():
        every = list(itertools.product([R, P, S0, S1], repeat=2))
        for source in every[::3]:
            check(mesh, spec(mesh, source), every)


def test_what_no_steps_lead_to_is_an_error_and_not_a_cost():
    masked = _MaskPartial(offset_shape=META.shape, offset_dim=0)
    with fake_mesh((4,)) as mesh:
        source = spec(mesh, (STRIDED,), use_strided_shard_as_shard_order=False)
        assert of_torch(source, spec(mesh, (masked,))) is NoPathError
        model = CostModel(source, (book := Codebook()), Topology(mesh))
        assert of_model(model, book, (masked,)) is NoPathError
        assert of_model(model, book, (R,)) == of_torch(source, spec(mesh, (R,)))


def test_a_cost_does_not_depend_on_what_was_asked_before():
    with fake_mesh((2, 4)) as mesh:
        targets = list(itertools.product([R, P, S0, S1, STRIDED], repeat=2))
        source = spec(mesh, (S0, STRIDED), use_strided_shard_as_shard_order=False)
        costs = []
        for order in (targets, targets[::-1]):
            model = CostModel(source, (book := Codebook()), Topology(mesh))
            costs.append({target: of_model(model, book, target, False) for target in order})
        assert costs[0] == costs[1]
