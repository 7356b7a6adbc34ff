"""The checking mode: torch's own dispatch beside every call, and both results compared.

On with `DTENSOR_RULES_CHECK=1` when the library is enabled. Everything is done twice, collectives
included, so it is for finding a wrong rule, not for training.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.utils import _pytree as pytree

from dtensor_rules import _compat, _core
from dtensor_rules.registry.validation import local_difference

VARIABLE = "DTENSOR_RULES_CHECK"

# Of aten; their results are memory as it is, whose values no two calls share.
_UNINITIALIZED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)


def wanted() -> bool:
    """Whether the environment asks for the checking mode.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} must be 1 (check every call) or 0")
    return value == "1"


def check(op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Makes a call both ways and compares.

    Returns:
        the library's own result.

    Raises:
        RuntimeError: an argument's local tensor disagrees with its spec, or the results differ in
            placements, global or local shapes, strides, dtypes, or values (but for partial sums and
            uninitialized memory).
            Where torch has no strategy for the operator: a result disagrees with its own spec.
    """
    _check_arguments(op, args, kwargs)
    if not any(op in table for table in _compat.strategy_tables()):
        return _checked_alone(op, args, kwargs)
    copies, named_copies = _copied(op, args, kwargs)
    with _on(_core.Path.TORCH):
        expected = op(*copies, **named_copies)
    with _on(_core.Path.UNCHECKED):
        result = op(*args, **kwargs)
    actual, native = pytree.tree_leaves(result), pytree.tree_leaves(expected)
    if len(actual) != len(native):
        raise RuntimeError(f"{op}: {len(actual)} results where torch has {len(native)}")
    for index, (one, other) in enumerate(zip(actual, native, strict=True)):
        if difference := _difference(one, other, values=not _is_uninitialized(op)):
            raise RuntimeError(
                f"{op}: result {index} has {difference}; a rule or the cache is wrong "
                f"(rules() lists the rules, remove_rule() takes one out)"
            )
    return result


def _checked_alone(
    op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Makes a call that only a rule can make: torch has nothing to compare with."""
    with _on(_core.Path.UNCHECKED):
        result = op(*args, **kwargs)
    for index, tensor in enumerate(pytree.tree_leaves(result)):
        if isinstance(tensor, DTensor) and (
            wrong := local_difference(tensor._spec, tensor._local_tensor)
        ):
            raise RuntimeError(f"{op}: result {index}: {wrong}; a rule is wrong")
    return result


@contextlib.contextmanager
def _on(path: _core.Path) -> Iterator[None]:
    before = _core.set_path(path)
    try:
        yield
    finally:
        _core.set_path(before)


def _check_arguments(
    op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    names = [argument.name for argument in op._schema.arguments]
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, DTensor) and (
                wrong := local_difference(tensor._spec, tensor._local_tensor)
            ):
                raise RuntimeError(f"{op}: argument {name!r}: {wrong}")


def _own_difference(tensor: object) -> str | None:
    """Describes how a DTensor's local tensor differs from its spec; None if it does not."""
    if not isinstance(tensor, DTensor):
        return None
    return local_difference(tensor._spec, tensor._local_tensor)


def _copied(
    op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[list[object], dict[str, object]]:
    """Returns the arguments, with copies of those that the operator writes."""
    written = {
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    names = [argument.name for argument in op._schema.arguments]
    copies = [
        _copy(value) if name in written else value for name, value in zip(names, args, strict=False)
    ]
    return copies, {name: _copy(v) if name in written else v for name, v in kwargs.items()}


def _copy(value: object) -> object:
    def copy(leaf: object) -> object:
        if isinstance(leaf, DTensor):
            return DTensor(leaf._local_tensor.clone(), leaf._spec, requires_grad=False)
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(copy, value)


def _is_uninitialized(op: torch._ops.OpOverload) -> bool:
    namespace, _, name = op._schema.name.partition("::")
    return namespace == "aten" and name in _UNINITIALIZED


def _difference(actual: object, native: object, values: bool) -> str | None:
    """Describes how two results differ, in their values only if ``values``; None if they do not."""
    if type(actual) is not type(native):
        return f"type {type(actual).__name__} where torch has {type(native).__name__}"
    if not isinstance(actual, DTensor) or not isinstance(native, DTensor):
        return _value_difference(actual, native) if values else None
    for what, one, other in (
        ("placements", actual.placements, native.placements),
        ("global shape", tuple(actual.shape), tuple(native.shape)),
        ("spec", actual._spec, native._spec),
        ("stride", actual.stride(), native.stride()),
        ("dtype", actual.dtype, native.dtype),
        ("local shape", tuple(actual._local_tensor.shape), tuple(native._local_tensor.shape)),
    ):
        if one != other:
            return f"{what} {one} where torch has {other}"
    if not values or any(isinstance(placement, Partial) for placement in actual.placements):
        return None  # ranks may share out a sum in another way
    return _value_difference(actual._local_tensor, native._local_tensor)


def _value_difference(actual: object, native: object) -> str | None:
    if isinstance(actual, torch.Tensor) and isinstance(native, torch.Tensor):
        same = actual.shape == native.shape and actual.dtype == native.dtype
        if same and torch.allclose(actual, native, rtol=0, atol=0, equal_nan=True):
            return None
        return "other values than torch's"
    return None if actual == native else f"value {actual!r} where torch has {native!r}"
