"""Which operators get a kernel, and what of their arguments is in the key."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from dtensor_rules import _compat, _core
from dtensor_rules.registry.rule import Rule

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_OWN_KERNELS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def install_kernels(rules: Sequence[Rule]) -> None:
    """Gives a kernel to every operator that torch can shard or a rule names, but random ones.

    Args:
        rules: all that there are; what they read is in the keys from here on, so cached plans must
            be forgotten with it.
    """
    random = DTensor._op_dispatcher._random_ops
    shardable = [op for table in _compat.strategy_tables() for op in table]
    named = [rule.overload for rule in rules]
    readers = [rule for rule in rules if rule.numbers]
    for op in dict.fromkeys([*shardable, *named]):
        if isinstance(op, torch._ops.OpOverload) and op not in random and _is_defined(op):
            _core.install_kernel(op, by_value(op, readers))


def _is_defined(op: torch._ops.OpOverload) -> bool:
    """Whether the library that defined an operator still exists; torch's tables keep its name."""
    return torch._C._dispatch_has_kernel(op.name())


def by_value(op: torch._ops.OpOverload, readers: Iterable[Rule] = ()) -> list[bool]:
    """Returns for each argument of the schema whether a number's value is part of the key.

    Torch's own key omits the arguments before `static_argnum` and the keywords that
    `static_kwargkey` does not name, for its strategies do not read them. This key omits those of
    them that are scalars: steps, learning rates, `alpha`; of these only the type is in the key.
    Integers and booleans are sizes, dims and flags, and always in it.

    Args:
        op: the operator.
        readers: the rules that may read any number; where one is for this operator, all are in.
    """
    arguments = _arguments(op)
    if any(rule.is_for(op) for rule in readers):
        return [True] * len(arguments)
    info = _compat.schema_info(op)
    first_static = len(arguments) if info is None else info.static_argnum
    static_names = [] if info is None else info.static_kwargkey or []
    return [
        not argument.is_scalar
        or (argument.name in static_names if argument.kwarg_only else index >= first_static)
        for index, argument in enumerate(arguments)
    ]


def why_never_asked(op: torch._ops.OpOverload) -> str | None:
    """Returns why no rule for an operator can be reached; None if it can."""
    dispatcher = DTensor._op_dispatcher
    if op in dispatcher._random_ops:
        return "it is random, which is torch's to do"
    if op in dispatcher._custom_op_handlers:
        return "torch has a handler for it, DTensor._op_dispatcher._custom_op_handlers"
    if op.has_kernel_for_dispatch_key(_COMPOSITE) and not any(
        op.has_kernel_for_dispatch_key(key) for key in _OWN_KERNELS
    ):
        return "torch makes it of other operators before DTensor sees it; name those"
    return None


class _Argument(NamedTuple):
    name: str
    kwarg_only: bool
    is_scalar: bool  # a `Scalar` or `float`, optional or in a list as well


@functools.cache  # schemas never change, are slow to read, and enable() asks for a thousand
def _arguments(op: torch._ops.OpOverload) -> tuple[_Argument, ...]:
    return tuple(
        _Argument(
            argument.name,
            argument.kwarg_only,
            any(word in str(argument.real_type) for word in ("number", "Scalar", "float")),
        )
        for argument in op._schema.arguments
    )
