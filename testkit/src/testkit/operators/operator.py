"""The entries of the table of operators: a function of tensors, and its operands.

Note: `testkit.cases` has tensors, `testkit.operators.table` the operators, and
`testkit.operators.cases` their calls on a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: Dtypes that a gradient can have.
FLOATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class OpInput:
    """An operand of an operator.

    Attributes:
        shape: of the global tensor.
        dtype: of the tensor; None for the dtype of the case.
        below: for indices: the values are non-negative integers below this number; None for others.
        differentiable: whether the operator has a gradient for it, if its dtype can have one.
        fixed: the only placement that it has, on every axis, such as ``"R"``; None for any.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    below: int | None = None
    differentiable: bool = True
    fixed: str | None = None


@dataclass(frozen=True)
class OpEntry:
    """An operator of the table.

    Attributes:
        name: as in test ids.
        run: called with one tensor per operand; returns tensors, scalars, or tuples or lists of
            them.
        operands: its operands.
        dtypes: of the cases in which it is called.
        mutates: the number of operands, from the first on, that it writes to.
    """

    name: str
    run: Callable[..., Any]
    operands: tuple[OpInput, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    mutates: int = 0
