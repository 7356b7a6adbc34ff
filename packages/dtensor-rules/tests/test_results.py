"""`OpDispatcher.wrap` in C++ beside torch's own: every kind of result, and what is not plain."""

import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import dtensor_rules
from dtensor_rules import _core
from testkit import fake_mesh

# Torch says of its generator that it is not made for the CPU.
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not")


@pytest.fixture
def mesh():
    with fake_mesh((2,)) as mesh:
        yield mesh


def spec(mesh, local, placement, factor=2):
    shape = list(local.shape)
    if isinstance(placement, Shard):
        shape[placement.dim] *= factor
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensorSpec(mesh, (placement,), tensor_meta=meta)


def describe(result, local):
    """All that can be seen of a wrapped result."""
    if isinstance(result, (list, tuple)):
        locals_ = local if isinstance(local, (list, tuple)) else [local] * len(result)
        return type(result), [describe(*pair) for pair in zip(result, locals_, strict=False)]
    if not isinstance(result, torch.Tensor) or type(result) is not DTensor:
        return type(result), result is local
    return {
        "spec": id(result._spec),
        "local": result._local_tensor is local,
        "shape": (result.shape, result.stride(), result.storage_offset(), result.dtype),
        "storage": (result.untyped_storage().nbytes(), result.device, result.layout),
        "resizable": result.untyped_storage().resizable(),
        "autograd": (result.requires_grad, result.is_leaf, result.grad_fn),
        "version": None if result.is_inference() else result._version,
        "view": (result._is_view(), result.is_conj(), result.is_neg(), result.is_inference()),
        "keys": str(torch._C._dispatch_keys(result)),
        "python": (type(result), sorted(vars(result))),
    }


TENSORS = {
    "matrix": lambda: torch.ones(4, 4),
    "bfloat16": lambda: torch.ones(4, 4, dtype=torch.bfloat16),
    "booleans": lambda: torch.ones(4, 4) > 0,
    "transposed": lambda: torch.ones(4, 4).t(),
    "part of another": lambda: torch.ones(8, 4)[3:7],
    "expanded": lambda: torch.ones(4, 1).expand(4, 4),
    "empty": lambda: torch.ones(4, 0),
    "empty and not at the beginning": lambda: torch.ones(4, 4)[2:, 4:],
    "meta": lambda: torch.ones(4, 4, device="meta"),
    "conjugated": lambda: torch.ones(4, 4, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(4, 4, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(4).to_sparse(),
    "zeros without memory": lambda: torch._efficientzerotensor(4, 4),
    "parameter": lambda: torch.nn.Parameter(torch.ones(4, 4), requires_grad=False),
    "in a graph": lambda: torch.ones(4, 4, requires_grad=True) * 2,
    "leaf that requires grad": lambda: torch.ones(4, 4, requires_grad=True),
    "asynchronous": lambda: AsyncCollectiveTensor(torch.ones(4, 4)),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=repr)
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor(mesh, name, placement):
    local = TENSORS[name]()
    given = spec(mesh, local, placement)
    expected = describe(OpDispatcher.wrap(local, given), local)
    with dtensor_rules.enabled():
        for _ in range(2):
            assert describe(OpDispatcher.wrap(local, given), local) == expected
            assert describe(OpDispatcher.wrap(res=local, spec=given), local) == expected


@pytest.mark.parametrize(
    "result", [None, 3, True, 2.5, 1j, "text", torch.float32, torch.tensor(2.0)], ids=repr
)
def test_what_is_no_tensor_or_has_no_spec_stays(mesh, result):
    assert OpDispatcher.wrap(result, None) is result
    with dtensor_rules.enabled():
        assert OpDispatcher.wrap(result, None) is result


def test_each_result_has_the_spec_that_was_given_though_another_is_equal(mesh):
    local = torch.ones(4, 2)
    first, second = spec(mesh, local, Shard(0)), spec(mesh, local, Shard(0))
    assert first == second
    with dtensor_rules.enabled():
        for given in (first, second, first):
            assert OpDispatcher.wrap(local, given)._spec is given


@pytest.mark.parametrize("kind", [list, tuple])
def test_several(mesh, kind):
    one, other, number = torch.ones(4, 2), torch.ones(3), torch.tensor(1.0)
    first, second = spec(mesh, one, Shard(0)), spec(mesh, other, Replicate())
    cases = [
        (kind([one, other]), [first, second]),
        (kind([one, other]), (first, second)),
        (kind([one, None, number, 3]), kind([first, None, None, None])),
        (kind([one, other]), [first]),  # zip ends with the shorter one
        (kind([kind([one]), other]), [[first], second]),
        (kind([]), []),
        (torch.return_types.max([one, other]), (first, second)),
    ]
    for results, specs in cases:
        expected = describe(OpDispatcher.wrap(results, specs), results)
        with dtensor_rules.enabled():
            assert describe(OpDispatcher.wrap(results, specs), results) == expected


def test_errors_are_those_of_torch(mesh):
    one = torch.ones(4, 2)
    first = spec(mesh, one, Shard(0))
    bare = DTensorSpec(mesh, (Shard(0),))
    cases = [
        (torch.Size([2]), None),
        (one, None),
        (one, [first]),
        (one, "spec"),
        ([one], None),
        ([one], first),
        (one, bare),
    ]
    for result, given in cases:
        with pytest.raises((AssertionError, RuntimeError)) as expected:
            OpDispatcher.wrap(result, given)
        with dtensor_rules.enabled(), pytest.raises(expected.type) as error:
            OpDispatcher.wrap(result, given)
        assert str(error.value) == str(expected.value)


def test_modes_are_torchs(mesh):
    one = torch.ones(4, 2)
    first = spec(mesh, one, Shard(0))

    def within(mode):
        with mode():
            local = torch.ones(4, 2)
            return describe(OpDispatcher.wrap(local, first), local)

    for mode in (FakeTensorMode, torch.inference_mode):
        expected = within(mode)
        with dtensor_rules.enabled():
            assert within(mode) == expected


def test_torchs_cpp_comes_here(mesh):
    """It has held the function since the first operator, long before the library was enabled."""
    x = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    torch.argmax(x)
    torch.neg(x)
    seen = []

    def profile(frame, event, argument):
        if event == "c_call":
            seen.append(argument)

    with dtensor_rules.enabled():
        sys.setprofile(profile)
        try:
            torch.rand_like(x)
        finally:
            sys.setprofile(None)
    assert seen.count(_core.wrap_result) == 1


def test_calls_that_are_torchs_give_what_they_gave(mesh):
    x = DTensor.from_local(torch.arange(8.0).view(2, 4), mesh, [Shard(0)])

    def calls():
        torch.manual_seed(0)
        found = [torch.argmax(x, 1), torch.nn.functional.dropout(x, 0.5), torch.rand_like(x)]
        storages = [one.untyped_storage().nbytes() for one in found]
        return [one._spec for one in found], storages, [one.to_local().clone() for one in found]

    expected = calls()
    with dtensor_rules.enabled():
        actual = calls()
    assert actual[:2] == expected[:2]
    for local, wanted in zip(actual[2], expected[2], strict=True):
        assert torch.equal(local, wanted)


def test_the_function_stays_itself(mesh):
    function, code = OpDispatcher.wrap, OpDispatcher.wrap.__code__
    with dtensor_rules.enabled():
        assert OpDispatcher.wrap is function
        assert OpDispatcher.wrap.__code__ is not code
    assert OpDispatcher.wrap.__code__ is code
