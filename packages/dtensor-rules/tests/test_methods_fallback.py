"""`DTensor.redistribute`, `from_local` and `to_local`: the calls that stay torch's."""

import contextlib
import copy
import inspect

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode

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
def test_given_gradient_placements_are_torchs(same_memory_every_time):
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


class Recording(TorchFunctionMode):
    """Writes down the names of the functions that reach it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_torch_function_modes_see_what_they_see_with_torch(requires_grad):
    with fake_mesh((2,)) as mesh:
        local = torch.ones(4, 2, requires_grad=requires_grad)

        def run():
            with Recording() as mode:
                DTensor.from_local(local, mesh, [S0]).redistribute(placements=[R]).to_local()
            return mode.seen

        expected, all_actual = both(run)
    assert "all_gather_into_tensor" in expected
    assert all_actual == [expected] * 3


@pytest.mark.parametrize("mode", [torch.inference_mode, enable_python_dispatcher])
def test_under_modes_without_a_stack_results_are_those_of_torch(mode):
    with fake_mesh((2,)) as mesh:
        x = DTensor.from_local(torch.ones(4, 2), mesh, [S0])

        def run(context=mode):
            with context():
                placed = DTensor.from_local(torch.ones(4, 2), mesh, [S0])
                moved, out = x.redistribute(placements=[R]), x.to_local()
            tensors = (placed, moved, out, placed._local_tensor, moved._local_tensor)
            seen = [(type(one), one.is_inference(), one._is_view()) for one in tensors]
            return seen, out is x._local_tensor

        run(contextlib.nullcontext)  # so that the library knows these calls
        expected, all_actual = both(run)
        assert all_actual == [expected] * 3
        assert [left(f"DTensor.{name}")["mode"] for name in NAMES] == [3, 3, 3]


def test_subclasses_of_dtensor_are_torchs():
    with fake_mesh((2,)) as mesh:
        plain = DTensor.from_local(torch.ones(4, 2), mesh, [S0])
        sub = Sub(plain._local_tensor, plain._spec, requires_grad=False)

        def run():
            results = [one.redistribute(placements=[R]) for one in (plain, sub)]
            return [type(one) for one in results], type(sub.to_local())

        expected, all_actual = both(run)
        assert all_actual == [expected] * 3
        for name in ("redistribute", "to_local"):
            assert left(f"DTensor.{name}") == {"subclass": 3}


def test_an_asynchronous_local_tensor_is_torchs():
    with fake_mesh((2,)) as mesh:

        def run():
            placed = DTensor.from_local(AsyncCollectiveTensor(torch.ones(4, 2)), mesh, [S0])
            return type(placed._local_tensor), placed.shape

        expected, all_actual = both(run)
        assert all_actual == [expected] * 3
        assert left("DTensor.from_local") == {"local subclass": 3}


def test_an_asynchronous_gradient_is_torchs():
    with fake_mesh((2,)) as mesh:
        local = torch.ones(4, 2, requires_grad=True)

        def run():
            placed = DTensor.from_local(local, mesh, [S0])
            out = placed.redistribute(placements=[R]).to_local()
            out.register_hook(AsyncCollectiveTensor)
            return torch.autograd.grad(out.sum(), local)[0]

        expected, all_actual = both(run)
        for actual in all_actual:
            assert_same_tensor(actual, expected)
        assert left("DTensor.to_local backward") == {"local subclass": 3}


class Cut(torch.autograd.Function):
    """The identity, which gives no gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.skipif(
    _compat.RELEASE < (2, 12), reason="2.11's from_local fails where there is no gradient"
)
def test_no_gradient_stays_none():
    with fake_mesh((2,)) as mesh:
        local = torch.ones(4, 2, requires_grad=True)

        def run():
            placed = DTensor.from_local(local, mesh, [S0])
            Cut.apply(placed).sum().to_local().backward()
            return local.grad

        expected, all_actual = both(run)
        assert (expected, all_actual) == (None, [None] * 3)


def test_another_mesh_is_refused_though_the_placements_are_known():
    with fake_mesh((4,)) as mesh:
        half = DeviceMesh("cpu", [0, 1])
        placed = DTensor.from_local(torch.ones(4, 2), mesh, [S0])
        for _ in range(2):
            assert placed.redistribute(mesh, [R]).placements == (R,)
            with pytest.raises(NotImplementedError, match="Cross device mesh"):
                placed.redistribute(half, [R])


def test_the_mesh_of_the_context_is_torchs_to_find():
    with fake_mesh((2,)) as mesh:
        other = DeviceMesh("cpu", [0, 1])
        for _ in range(2):
            for one in (mesh, other):
                with one:
                    placed = DTensor.from_local(torch.ones(4, 2), placements=[S0])
                assert placed.device_mesh is one


def test_writing_into_what_was_wrapped_is_refused_as_by_torch():
    with fake_mesh((2,)) as mesh:
        for _ in range(2):
            placed = DTensor.from_local(torch.ones(4, 2), mesh, [S0])
            with pytest.raises(RuntimeError, match="view was created in no_grad mode"):
                placed._local_tensor.add_(torch.ones(4, 2, requires_grad=True))


def test_a_rank_outside_the_mesh():
    with fake_mesh((4,), rank=3):
        mesh = DeviceMesh("cpu", [0, 1])
        for _ in range(3):
            placed = DTensor.from_local(torch.ones(4, 2), mesh, [S0])
            assert placed.to_local().numel() == 0
            assert placed.redistribute(placements=[R]).placements == (R,)
        for method in ("redistribute", "to_local"):
            assert left(f"DTensor.{method}") == {"not in mesh": 3}


def test_a_spec_without_a_shape():
    with fake_mesh((2,)) as mesh:
        placed = DTensor.from_local(torch.ones(4, 2), mesh, [S0])
        placed._spec.tensor_meta = None
        for _ in range(3):
            assert placed.to_local().shape == (4, 2)
        assert left("DTensor.to_local") == {"symint": 3}


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
    native = {name: vars(DTensor)[name] for name in NAMES}
    with dtensor_rules.enabled():
        for name in NAMES:
            assert vars(DTensor)[name] is not native[name]
            assert inspect.signature(getattr(DTensor, name)) == inspect.signature(
                native[name].__func__ if isinstance(native[name], staticmethod) else native[name]
            )
            assert getattr(DTensor, name).__doc__ == getattr(native[name], "__doc__", None)
    assert {name: vars(DTensor)[name] for name in NAMES} == native
    dtensor_rules.enable()


def test_a_changed_spec_is_not_handed_out():
    with fake_mesh((2,)) as mesh:
        for _ in range(2):
            placed = DTensor.from_local(torch.ones(4, 2), mesh, [S0])
        placed._spec.placements = (S1,)
        assert DTensor.from_local(torch.ones(4, 2), mesh, [S0]).placements == (S0,)
