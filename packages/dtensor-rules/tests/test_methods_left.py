"""`DTensor.redistribute`, `from_local` and `to_local`: the calls that stay torch's."""

import copy
import inspect

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import dtensor_rules
from dtensor_rules import _compat
from testkit import assert_same_tensor, fake_mesh

R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial()
NAMES = ("redistribute", "from_local", "to_local")


@pytest.fixture(autouse=True)
def _enabled():
    with dtensor_rules.enabled():
        dtensor_rules.cache_clear()
        dtensor_rules.stats_clear()
        yield


def both(function, *, times=3):
    """What a function gives with torch alone, and with the library at its first and later calls."""
    dtensor_rules.disable()
    expected = function()
    dtensor_rules.enable()
    return expected, [function() for _ in range(times)]


def left(name):
    return dtensor_rules.stats()[name].fallthrough


class Sub(DTensor):
    pass


def test_what_is_not_plain_is_torchs():
    with fake_mesh((2,)) as mesh:
        local = torch.ones(4, 2)
        placed = DTensor.from_local(local, mesh, [S0])
        with pytest.raises(RuntimeError, match="Can not redistribute from"):
            placed.redistribute(placements=[Partial("max")])
        with pytest.raises(RuntimeError, match="placements is needed"):
            placed.redistribute()
        with pytest.raises(RuntimeError, match="argument only accepts"):
            DTensor.from_local(placed, mesh, [S0])
        with pytest.raises(ValueError, match="artial"):
            DTensor.from_local(local, mesh, [SUM, Partial("max")])
        waiting = placed.redistribute(placements=[R], async_op=True)
        assert isinstance(waiting._local_tensor, AsyncCollectiveTensor)
        assert (
            placed.redistribute(placements=[R], forward_dtype=torch.float64).dtype == torch.float64
        )
        assert waiting.redistribute(placements=[S0]).placements == (S0,)
        assert left("DTensor.redistribute")["local subclass"] == 1
        assert "DTensor.to_local" not in dtensor_rules.stats()
        assert placed.to_local(grad_placements=[R]).shape == (4, 2)


def test_to_a_sum_is_torchs():
    with fake_mesh((2,)) as mesh:
        placed = DTensor.from_local(torch.ones(4, 2), mesh, [S0], run_check=False)

        def run():  # torch fills a shard with zeros from 2.14 on
            try:
                return placed.redistribute(placements=[SUM]).to_local()
            except RuntimeError as error:
                return torch.tensor(list(str(error).encode()))

        expected, all_actual = both(run)
        for actual in all_actual:
            assert_same_tensor(actual, expected)


@pytest.mark.skipif(
    _compat.RELEASE < (2, 12), reason="2.11's from_local knows no placements of its gradient"
)
def test_given_gradient_placements_are_torchs():
    with fake_mesh((2,)) as mesh:
        local = torch.ones(4, 2, requires_grad=True)

        def run():
            placed = DTensor.from_local(local, mesh, [S0], grad_placements=[S0])
            out = placed.redistribute(placements=[R]).to_local(grad_placements=[SUM])
            return torch.autograd.grad(out.sum(), local)[0]

        expected, all_actual = both(run)
        for actual in all_actual:
            assert_same_tensor(actual, expected)


def test_modes_see_what_they_see_with_torch():
    with fake_mesh((2,)) as mesh:
        placed = DTensor.from_local(torch.ones(4, 2), mesh, [S0])
        placed.redistribute(placements=[R])
        with CommDebugMode() as log:
            placed.redistribute(placements=[R])
        assert log.get_total_counts() == 1
        assert left("DTensor.redistribute")["mode"] == 1


def test_a_rank_outside_the_mesh():
    with fake_mesh((4,), rank=3):
        mesh = DeviceMesh("cpu", [0, 1])
        for _ in range(3):
            placed = DTensor.from_local(torch.ones(4, 2), mesh, [S0])
            assert placed.to_local().numel() == 0
            assert placed.redistribute(placements=[R]).placements == (R,)


def test_functorch_is_torchs():
    with fake_mesh((2,)) as mesh:
        placed = DTensor.from_local(torch.ones(4, 2), mesh, [S0])
        placed.redistribute(placements=[R])

        def total(tensor):
            return placed.redistribute(placements=[R]).to_local().sum() * tensor

        with pytest.raises(RuntimeError, match="setup_context"):  # as with torch alone
            torch.func.grad(total)(torch.ones(()))


def test_deep_copies():
    with fake_mesh((2,)) as mesh:
        expected, all_actual = both(
            lambda: copy.deepcopy(DTensor.from_local(torch.ones(4, 2), mesh, [S0]))
        )
        for actual in all_actual:
            assert_same_tensor(actual, expected)


# torch.compile instantiates torch's autograd functions, which warns, without this library too.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_is_that_of_torch():
    with fake_mesh((2,)) as mesh:

        def function(tensor):
            placed = DTensor.from_local(tensor, mesh, [S0])
            return placed.redistribute(placements=[R]).to_local() * 2

        def compiled():
            torch._dynamo.reset()
            return torch.compile(function, backend="aot_eager", fullgraph=True)(torch.ones(4, 2))

        expected, all_actual = both(compiled)
        for actual in (*all_actual, *both(compiled)[1]):
            assert_same_tensor(actual, expected)
        dtensor_rules.disable()
        assert_same_tensor(compiled(), expected)
        dtensor_rules.enable()


# Switching.


def test_the_methods_are_torchs_again_after_disable():
    dtensor_rules.disable()
    stock = {name: vars(DTensor)[name] for name in NAMES}
    with dtensor_rules.enabled():
        for name in NAMES:
            assert vars(DTensor)[name] is not stock[name]
            assert inspect.signature(getattr(DTensor, name)) == inspect.signature(
                stock[name].__func__ if isinstance(stock[name], staticmethod) else stock[name]
            )
            assert getattr(DTensor, name).__doc__ == getattr(stock[name], "__doc__", None)
    assert {name: vars(DTensor)[name] for name in NAMES} == stock
    dtensor_rules.enable()


def test_a_changed_spec_is_not_handed_out():
    with fake_mesh((2,)) as mesh:
        for _ in range(2):
            placed = DTensor.from_local(torch.ones(4, 2), mesh, [S0])
        placed._spec.placements = (S1,)
        assert DTensor.from_local(torch.ones(4, 2), mesh, [S0]).placements == (S0,)
