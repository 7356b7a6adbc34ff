"""Which operators get a kernel, and what of their arguments is in the key."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from dtensor_rules import _compat, _core


def install_kernels() -> None:
    """Gives a kernel to every operator that torch can shard and that has none yet."""
    random = DTensor._op_dispatcher._random_ops
    for table in _compat.strategy_tables():
        for op in table:
            if isinstance(op, torch._ops.OpOverload) and op not in random:
                _core.install_kernel(op, by_value(op))


def by_value(op: torch._ops.OpOverload) -> list[bool]:
    """Per argument of the schema, whether a number there is part of the key with its value.

    Torch's own key omits the arguments before `static_argnum` and the keywords that
    `static_kwargkey` does not name, for its strategies do not read them. Ours omits those of them
    that are scalars: steps, learning rates, `alpha`; of these only the type is in the key.
    Integers and booleans are sizes, dims and flags, and always in it.
    """
    arguments = op._schema.arguments
    info = _compat.schema_info(op)
    first_static = len(arguments) if info is None else info.static_argnum
    static_names = [] if info is None else info.static_kwargkey or []
    return [
        not _is_scalar(argument)
        or (argument.name in static_names if argument.kwarg_only else index >= first_static)
        for index, argument in enumerate(arguments)
    ]


def _is_scalar(argument: torch.Argument) -> bool:
    """`Scalar` or `float`, optional or in a list as well."""
    return any(word in str(argument.real_type) for word in ("number", "Scalar", "float"))
