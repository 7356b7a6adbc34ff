"""Wherever the fast path steps aside, torch does what it did without it; and it says why."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor_rules
from testkit import assert_same_tensor, fake_mesh


@pytest.fixture
def mesh():
    with fake_mesh((4,), rank=1) as mesh:
        yield mesh


def placed(mesh, placement=None, rows=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    local = torch.randn(rows, 4, generator=generator)
    return DTensor.from_local(local, mesh, [placement or Shard(0)], run_check=False)


def left(reason):
    """How many calls were left to torch for a reason."""
    return sum(op.fallthrough.get(reason, 0) for op in dtensor_rules.stats().values())


def taken():
    """How many calls took the fast path."""
    return sum(op.rule + op.cache + op.miss for op in dtensor_rules.stats().values())


def both(function, *args):
    """What a function returns with native torch, and with the fast path; its counts are cleared."""
    native = function(*args)
    with dtensor_rules.enabled():
        function(*args)
        dtensor_rules.stats_clear()
        return native, function(*args)


def test_a_call_like_these_takes_the_fast_path_when_nothing_is_in_its_way(mesh):
    native, actual = both(lambda: placed(mesh) * 2 + placed(mesh, seed=1))
    assert_same_tensor(actual, native)
    assert taken() >= 2
    assert all(not op.fallthrough for op in dtensor_rules.stats().values())


class Recording(TorchDispatchMode):
    """Writes down what reaches it, and with which types."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((str(func), [type(arg).__name__ for arg in args]))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_what_it_saw(mesh):
    def record():
        with Recording() as mode:
            (placed(mesh, Partial()) * 2).redistribute(placements=[Replicate()])
        return mode.seen

    native, actual = both(record)
    assert actual == native
    assert left("mode") > 0


def test_a_dispatch_mode_sees_what_backward_saves(mesh):
    def record():
        x = (placed(mesh) * 2).requires_grad_()
        with Recording() as mode:
            x.exp().sum().backward()
        return mode.seen

    native, actual = both(record)
    assert actual == native
    assert ("aten.detach.default", ["DTensor"]) in native


def test_without_torch_dispatch_there_is_no_dtensor_made(mesh):
    def data():
        x = placed(mesh) * 2
        with torch._C._DisableTorchDispatch():
            return type(x.data), type(x)

    native, actual = both(data)
    assert actual == native == (torch.Tensor, DTensor)


def test_tensors_that_outlive_the_library_are_detached_by_torch(mesh):
    with dtensor_rules.enabled():
        x = placed(mesh) * 2
        x.data  # noqa: B018 - so that the library knows the call
    assert type(x.data) is DTensor
    assert dtensor_rules.cache_info().size == 0


def test_comm_debug_mode_counts_what_it_counted(mesh):
    def count():
        with CommDebugMode() as mode:
            placed(mesh) @ placed(mesh, Shard(1), rows=4)
        return dict(mode.get_comm_counts())

    native, actual = both(count)
    assert actual == native
    assert sum(native.values()) > 0
    assert left("mode") > 0


def test_fake_tensor_mode_gets_fake_local_tensors(mesh):
    def fake():
        with FakeTensorMode():
            made = DTensor.from_local(torch.randn(2, 4), mesh, [Shard(0)], run_check=False)
            result = (made * 2).sum()
        return type(result._local_tensor).__name__, result.placements, result.shape

    native, actual = both(fake)
    assert actual == native
    assert native[0] == "FakeTensor"
    assert left("mode") > 0


def test_fake_local_tensors_outside_of_their_mode(mesh):
    with FakeTensorMode():
        made = DTensor.from_local(torch.randn(2, 4), mesh, [Shard(0)], run_check=False)
    native, actual = both(lambda: made * 2)
    assert type(actual._local_tensor) is type(native._local_tensor)
    assert actual._spec == native._spec
    assert left("local subclass") > 0


def test_inference_mode(mesh):
    def infer():
        with torch.inference_mode():
            return placed(mesh).mul(2)

    native, actual = both(infer)
    assert_same_tensor(actual, native)
    assert actual.is_inference() == native.is_inference()
    assert left("mode") > 0


def test_what_is_left_is_counted_after_a_plan_was_made_too(mesh):
    with dtensor_rules.enabled():
        x = placed(mesh)
        x * 2
        dtensor_rules.stats_clear()
        with torch.inference_mode():
            torch.neg(x)
        assert left("mode") > 0


def test_a_tensor_made_in_inference_mode_and_used_after(mesh):
    with torch.inference_mode():
        made = placed(mesh)
    native, actual = both(lambda: made * 2)
    assert_same_tensor(actual, native)
    assert actual.is_inference() == native.is_inference()


def test_a_spec_without_a_shape_is_refused_in_the_same_words(mesh):
    x = placed(mesh)
    x._spec.tensor_meta = None

    def refuse():
        with pytest.raises(RuntimeError, match="does not contain tensor_meta") as error:
            x * 2
        return str(error.value)

    native, actual = both(refuse)
    assert actual == native
    assert left("symint") == 1


class Named(DTensor):
    """A subclass of DTensor."""


def test_a_subclass_of_dtensor_is_torchs(mesh):
    plain = placed(mesh)
    named = Named(plain._local_tensor, plain._spec, requires_grad=False)
    native, actual = both(lambda: named * 2)
    assert_same_tensor(actual, native)
    assert left("subclass") > 0


class Scaled(torch.Tensor):
    """A wrapper subclass that is no DTensor; it takes over every operator that it is part of."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return "taken over"


def test_another_subclass_beside_a_dtensor_takes_over(mesh):
    other = Scaled(torch.ones(32, 4))

    def add():
        try:
            return torch.ops.aten.add.Tensor(placed(mesh), other)
        except Exception as error:
            return type(error), str(error)

    native, actual = both(add)
    assert actual == native
    assert left("subclass") > 0


def test_a_plain_tensor_beside_a_dtensor_is_refused_in_the_same_words(mesh):
    def add():
        with pytest.raises(RuntimeError, match="mixed") as error:
            placed(mesh) + torch.ones(32, 4)
        return str(error.value)

    native, actual = both(add)
    assert actual == native
    assert left("plain tensor") > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_mode_derivatives(mesh):
    def refuse():  # torch 2.13 has no sharding strategy for what make_dual asks
        with pytest.raises(NotImplementedError) as error, forward_ad.dual_level():
            forward_ad.make_dual(placed(mesh), placed(mesh, seed=1))
        return str(error.value)

    native, actual = both(refuse)
    assert actual == native


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_functorch(mesh, transform):
    def run():
        if transform == "vmap":
            return torch.func.vmap(lambda x: x * 2)(placed(mesh, Replicate()))
        return torch.func.grad(lambda x: (x * x).sum())(placed(mesh, Replicate()))

    def attempt():
        try:
            return run()
        except Exception as error:
            return type(error), str(error)

    native, actual = both(attempt)
    if isinstance(native, tuple):
        assert actual == native
    else:
        assert_same_tensor(actual, native)
    assert taken() > 0  # below the transform the operators are ordinary ones


def test_a_rank_outside_of_the_mesh():
    with fake_mesh((4,), rank=3):
        part = DeviceMesh("cpu", [0, 1])
        made = DTensor.from_local(torch.ones(2, 4), part, [Shard(0)], run_check=False)
        assert part.get_coordinate() is None
        native, actual = both(lambda: (made * 2).sum())
        assert_same_tensor(actual, native)
        assert left("not in mesh") > 0


def test_an_asynchronous_collective_is_awaited_when_it_is_used(mesh):
    def add():
        pending = placed(mesh).redistribute(placements=[Replicate()], async_op=True)
        assert type(pending._local_tensor) is AsyncCollectiveTensor
        return pending + placed(mesh, Replicate(), rows=32)

    native, actual = both(add)
    assert_same_tensor(actual, native)
    assert left("local subclass") > 0


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
def test_random_operators_are_torchs(mesh):
    def draw():
        torch.manual_seed(0)
        return torch.nn.functional.dropout(placed(mesh), 0.5)

    native, actual = both(draw)
    assert_same_tensor(actual, native)
    assert not [name for name in dtensor_rules.stats() if "bernoulli" in name]


def test_operators_with_handlers_of_their_own_are_torchs(mesh):
    native, actual = both(lambda: placed(mesh).argmax())
    assert_same_tensor(actual, native)
    assert left("handler") > 0


def test_an_operator_without_a_strategy_raises_as_ever(mesh):
    heads = placed(mesh, Replicate(), rows=64).view(2, 4, 8, 4)

    def refuse():
        with pytest.raises(NotImplementedError) as error:
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return str(error.value)

    native, actual = both(refuse)
    assert actual == native


@pytest.mark.parametrize(
    "dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["static", "dynamic"]
)
def test_torch_compile(mesh, dynamic):
    def function(x, y):
        return ((x * 2 + y).t() @ y).relu()

    def compiled():
        torch._dynamo.reset()
        run = torch.compile(function, backend="aot_eager", dynamic=dynamic, fullgraph=True)
        results = []
        for rows in (8, 12):  # with dynamic shapes the sizes are symbols
            x = placed(mesh, rows=rows).requires_grad_()
            result = run(x, placed(mesh, rows=rows, seed=1))
            result.sum().backward()
            results += [result.detach(), x.grad]
        return results

    native, actual = both(compiled)
    for expected, got in zip(native, actual, strict=True):
        assert_same_tensor(got, expected)


def test_disable_gives_everything_back(mesh):
    dtensor_rules.enable()
    dtensor_rules.enable()  # again changes nothing
    assert dtensor_rules.is_enabled()
    dtensor_rules.disable()
    assert not dtensor_rules.is_enabled()
    dtensor_rules.stats_clear()
    placed(mesh) * 2
    assert dtensor_rules.stats() == {} or taken() == 0


def test_enabled_restores_what_was_before(mesh):
    with dtensor_rules.enabled():
        with dtensor_rules.enabled():
            pass
        assert dtensor_rules.is_enabled()
    assert not dtensor_rules.is_enabled()
    with pytest.raises(ZeroDivisionError), dtensor_rules.enabled():
        raise ZeroDivisionError
    assert not dtensor_rules.is_enabled()


def test_plain_tensors_never_come_here(mesh):
    with dtensor_rules.enabled():
        dtensor_rules.stats_clear()
        (torch.ones(4, 4) * 2 + 1).sum().item()
        assert dtensor_rules.stats() == {} or taken() == 0
