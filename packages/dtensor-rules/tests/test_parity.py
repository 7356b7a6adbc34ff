"""Every operator of testkit's table, with the fast path and without: all that can be seen is equal.

On a fake mesh, whose collectives compute the same nonsense every time: what is compared bitwise
is deterministic everywhere, and true where no rank needs another.
"""

import contextlib
import re
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import dtensor_rules
from dtensor_rules import _compat, _core
from testkit import fake_mesh
from testkit.operators import operator_cases

# The rank that is played on each mesh: the last of four has uneven and empty shards.
RANKS = {(4,): 3, (2, 2): 2}
# What torch does itself, in part or whole, and why: results are compared all the same.
TORCHS = {
    "argmax": "torch has a handler for it",
    "dropout in eval": "gives back its argument",
    "equal": "of partial sums: torch reduces them first",
    "mse_loss": "torch decomposes it",
    "mv": "torch decomposes it",
    "norm": "the scalar of its backward is a tensor in a list of numbers",
}
if _compat.RELEASE < (2, 12):
    TORCHS["max dim"] = "torch has a handler for it"
# A rule adds a replica to a partial sum on one rank, where torch divides it by their number:
# the sums are equal (test_builtin), the shares are not.
ADDS = ("add", "add alpha", "add odd")
ON_TWO_AXES = (
    "add", "mul scalar", "add_", "sum", "mean dim", "mm", "view", "t", "transpose",
    "slice", "chunk", "cat", "softmax", "layer_norm", "embedding", "where", "gather", "zeros_like",
    "_foreach_add_",
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """All that a program can see of a tensor."""

    type: type
    shape: tuple
    stride: tuple
    dtype: torch.dtype
    offset: int
    room: int  # bytes of the storage
    version: int
    requires_grad: bool
    is_leaf: bool
    node: str  # the name of its autograd node's type
    is_view: bool
    is_operand: int | None  # the position of the operand that it is
    base_is_operand: int | None
    memory_of: tuple  # the positions of the operands whose memory it uses
    bits: bytes
    spec: tuple | None
    local: "Seen | None"


def see(value, operands):
    """A tensor as `Seen` beside the operands of its call; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    distributed = isinstance(value, DTensor)
    return Seen(
        type=type(value),
        shape=tuple(value.shape),
        stride=value.stride(),
        dtype=value.dtype,
        offset=value.storage_offset(),
        room=value.untyped_storage().nbytes(),
        version=value._version,
        requires_grad=value.requires_grad,
        is_leaf=value.is_leaf,
        node=type(value.grad_fn).__name__,
        is_view=value._is_view(),
        is_operand=_position(value, operands),
        base_is_operand=_position(value._base, operands),
        memory_of=tuple(i for i, other in enumerate(operands) if _memory(other) == _memory(value)),
        bits=b"" if distributed else _bits(value),
        spec=_spec(value._spec) if distributed else None,
        local=see(value._local_tensor, [x._local_tensor for x in operands])
        if distributed
        else None,
    )


def _position(tensor, operands):
    return next((index for index, other in enumerate(operands) if other is tensor), None)


def _memory(tensor):
    return tensor.untyped_storage()._cdata


def _bits(tensor):
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


def _spec(spec):
    meta = spec.tensor_meta
    return (spec.mesh, str(spec.placements), type(meta.shape), meta, spec.shard_order)


def attempt(case, inputs, *, grad):
    """One call of an operator, and its backward: all that can be seen of them, by name."""
    seen, outputs = {}, []
    # What requires grad and is written to is no leaf.
    copied = case.operator.mutates if grad else 0
    operands = [x.clone() if i < copied else x for i, x in enumerate(inputs)]
    with torch.set_grad_enabled(grad), _errors_into(seen, "error"):
        outputs = tree_leaves(case.operator.run(*operands))
    for index, output in enumerate(outputs):
        seen[f"output {index}"] = see(output, operands)
    for index, operand in enumerate(operands):
        seen[f"operand {index} afterwards"] = see(operand, operands)
    ends = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    if ends and leaves:
        with _errors_into(seen, "error of backward"):
            starts = [_like(end) for end in ends]
            grads = torch.autograd.grad(ends, leaves, starts, allow_unused=True)
            seen |= {f"gradient {index}": see(g, operands) for index, g in enumerate(grads)}
    return seen


@contextlib.contextmanager
def _errors_into(seen, name):
    try:
        yield
    except Exception as error:
        seen[name] = (type(error), re.sub(r"0x[0-9a-f]+", "0x", str(error)))


def _like(tensor):
    """A gradient for a tensor, of different numbers and the same placements."""
    local = tensor._local_tensor
    numbers = torch.arange(1, local.numel() + 1).remainder(7).view(local.shape).to(local.dtype)
    return DTensor.from_local(
        numbers,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def differences(native, actual, path=""):
    """What is not equal, one line each."""
    if native == actual and type(native) is type(actual):
        return
    if isinstance(native, dict) and isinstance(actual, dict):
        for key in {**native, **actual}:
            yield from differences(native.get(key), actual.get(key), key)
    elif is_dataclass(native) and is_dataclass(actual):
        for field in fields(native):
            pair = getattr(native, field.name), getattr(actual, field.name)
            yield from differences(*pair, f"{path}.{field.name}")
    else:
        yield f"{path}: native has {native!r}, actual {actual!r}"


def two_calls(case, mesh, *, grad):
    """What is seen of two equal calls, and what both counters say of the second."""
    flags = case.differentiable() if grad else [False] * len(case.operands)
    calls, counts, typed = [], {}, {}
    for _ in range(2):
        inputs = [x.requires_grad_(flag) for x, flag in zip(case.inputs(mesh), flags, strict=True)]
        dtensor_rules.stats_clear()
        calls.append(attempt(case, inputs, grad=grad))
        counts, typed = dtensor_rules.stats(), _core.typed_counts()
    return calls, counts, typed


@pytest.fixture(scope="class")
def mesh_and_stock(request, same_memory_every_time):
    """A fake mesh, and what native torch does there in the tests that are going to run.

    The fast path is then on for all of them: to switch it on takes longer than a case. A case is
    new to its cache when it comes without gradients, and known when it comes with them.
    """
    shape, native = request.cls.SHAPE, {}
    with fake_mesh(shape, rank=RANKS[shape]) as mesh:
        for item in request.session.items:
            if item.cls is request.cls:
                case, grad = item.callspec.params["case"], item.callspec.params["grad"]
                native[case, grad] = two_calls(case, mesh, grad=grad)[0]
        with dtensor_rules.enabled():
            yield mesh, native


def check(case, mesh_and_stock, *, grad):
    mesh, native = mesh_and_stock
    actual, counts, typed = two_calls(case, mesh, grad=grad)
    shared_out = case.operator.name in ADDS and ("-R,Psum-" in str(case) or "-Psum,R-" in str(case))
    for number, (expected, got) in enumerate(zip(native[case, grad], actual, strict=True), 1):
        found = list(differences(expected, got))
        if shared_out:
            found = [line for line in found if not line.startswith("output 0.local.bits")]
        assert found == [], f"call {number}"
    hits = {name: op.rule + op.cache for name, op in counts.items() if name in typed}
    assert hits == {name: typed[name] for name in hits}, "a typed kernel ran only some of its calls"
    if case.operator.name in TORCHS:
        return
    if not any("error" in name for name in native[case, grad][0]):
        # from_local is the tests' own, to make a gradient.
        counts = {name: op for name, op in counts.items() if name != "DTensor.from_local"}
        assert any(op.rule + op.cache for op in counts.values()), "nothing took the fast path"
        slow = {name: op for name, op in counts.items() if op.miss or op.fallthrough}
        assert slow == {}, "the second call did not take the fast path everywhere"


def every_other_is_slow(cases):
    """Of each operator's calls every other is in the fast tier, the first among them."""
    by_operator, params = Counter(), []
    for case in cases:
        slow = by_operator[case.operator.name] % 2
        by_operator[case.operator.name] += 1
        params.append(pytest.param(case, marks=[pytest.mark.slow] * slow))
    return params


with_and_without_grad = pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])


class TestOnFourRanks:
    SHAPE = (4,)

    @with_and_without_grad
    @pytest.mark.parametrize("case", every_other_is_slow(operator_cases(SHAPE)), ids=str)
    def test_two_calls(self, case, grad, mesh_and_stock):
        check(case, mesh_and_stock, grad=grad)


class TestOnTwoAxes:
    SHAPE = (2, 2)

    @with_and_without_grad
    @pytest.mark.parametrize(
        "case", every_other_is_slow(operator_cases(SHAPE, ON_TWO_AXES)), ids=str
    )
    def test_two_calls(self, case, grad, mesh_and_stock):
        check(case, mesh_and_stock, grad=grad)
