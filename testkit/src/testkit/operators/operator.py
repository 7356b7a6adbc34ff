"""What a test calls: an operator, a function of tensors, and its operands.

Note: `testkit.cases` has tensors, this and the table in `testkit.operators.table` have what is done
to them, and `testkit.operators.cases` puts them on a mesh.
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
    """A tensor that an operator takes.

    Attributes:
        shape: of the global tensor.
        dtype: None for the dtype of the case.
        below: None, or fill it with non-negative integers below this one: indices.
        differentiable: whether the operator has a gradient for it, where its dtype can have one.
        fixed: None, or the only placement it comes with, on every axis: ``"R"``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    below: int | None = None
    differentiable: bool = True
    fixed: str | None = None


@dataclass(frozen=True)
class OpEntry:
    """A function of tensors.

    Attributes:
        name: of a test's id.
        run: takes one tensor per operand; returns tensors, scalars, or tuples or lists of them.
        operands: what it takes.
        dtypes: those of a case that make sense.
        mutates: how many of its operands, from the first on, it writes into.
    """

    name: str
    run: Callable[..., Any]
    operands: tuple[OpInput, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    mutates: int = 0
