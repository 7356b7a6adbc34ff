"""The calls that tests of DTensor dispatch make: every operator, on a mesh, with placements."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from testkit.cases import SHORT, Case, placements_named
from testkit.operators.operator import OpEntry, OpInput
from testkit.operators.table import OPERATORS

_ONE_AXIS = "R S0 S1 Psum"
_TWO_AXES = "R.R S0.R S0.S1 S0.S0 Psum.S0"


@dataclass(frozen=True)
class OperatorCase:
    """One call: an operator on a mesh, with placements and a dtype.

    Attributes:
        operator: what is called.
        dtype: of those operands that have none of their own.
        operands: one row of the table of tensors for each of its operands.
    """

    operator: OpEntry
    dtype: torch.dtype
    operands: tuple[Case, ...]

    def __str__(self) -> str:
        """The test id, e.g. ``mul scalar-mesh2x2-S0.R-f32``."""
        mesh = "x".join(map(str, self.mesh_shape))
        placements = ",".join(str(operand).split("-")[1] for operand in self.operands)
        return f"{self.operator.name}-mesh{mesh}-{placements}-{SHORT[self.dtype]}"

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Size of each mesh axis."""
        return self.operands[0].mesh_shape

    def differentiable(self) -> list[bool]:
        """Whether each operand can require a gradient."""
        return [
            operand.differentiable and case.dtype.is_floating_point
            for operand, case in zip(self.operator.operands, self.operands, strict=True)
        ]

    def inputs(self, mesh: DeviceMesh) -> list[DTensor]:
        """The operands as DTensors, made without communication; each call gives the same values.

        Args:
            mesh: of `mesh_shape`, real or fake.

        Returns:
            Leaves that do not require gradients.
        """
        made = []
        for seed, (operand, case) in enumerate(
            zip(self.operator.operands, self.operands, strict=True)
        ):
            tensor = case.tensor(seed)
            if operand.below is not None:
                tensor = tensor.abs() % operand.below
            made.append(case.distribute(mesh, tensor))
        return made


def operator_cases(
    mesh_shape: tuple[int, ...], only: Collection[str] | None = None
) -> list[OperatorCase]:
    """The calls of the operators on a mesh, in the table's order.

    In the first of its dtypes an operator is called with the same placement for all operands, with
    the first one replicated, and with the first one placed otherwise than the rest; in others with
    all of them sharded on their first dim.

    Args:
        mesh_shape: ``(4,)`` or any other of one or two axes.
        only: names of operators; by default all. On two axes torch needs some 50 ms to find the
            sharding of one new call.

    Raises:
        ValueError: more than two axes, or an unknown operator.
    """
    if len(mesh_shape) > 2:
        raise ValueError(f"operator_cases: mesh_shape={mesh_shape} must have one or two axes")
    if unknown := set(only or ()) - {operator.name for operator in OPERATORS}:
        raise ValueError(f"operator_cases: only={sorted(unknown)} are not in the table")
    return [
        OperatorCase(operator, dtype, operands)
        for operator in OPERATORS
        if only is None or operator.name in only
        for dtype in operator.dtypes
        for operands in _rows(operator, mesh_shape, dtype)
    ]


def _rows(
    operator: OpEntry, mesh_shape: tuple[int, ...], dtype: torch.dtype
) -> list[tuple[Case, ...]]:
    """The operands of one operator with every choice of placements."""
    names = (_ONE_AXIS if len(mesh_shape) == 1 else _TWO_AXES).split()
    choices: list[list[Case]] = []
    for operand in operator.operands:
        own = [".".join(operand.fixed * len(mesh_shape))] if operand.fixed else names
        rows = [_case(operand, mesh_shape, dtype, name) for name in own]
        choices.append([row for row in rows if row is not None])
    if dtype is not operator.dtypes[0]:
        return [tuple(_named(rows, names[1]) for rows in choices)]
    found: dict[tuple[Case, ...], None] = {}
    for position, name in enumerate(names):
        same = [_named(rows, name) for rows in choices]
        others = [_named(rows, names[position - 1]) for rows in choices]
        found |= {tuple(same): None, (choices[0][0], *same[1:]): None, (same[0], *others[1:]): None}
    return list(found)


def _named(rows: list[Case], name: str) -> Case:
    """The row of these placements, or the first: replicated."""
    wanted = placements_named(name)
    return next((row for row in rows if row.placements == wanted), rows[0])


def _case(
    operand: OpInput, mesh_shape: tuple[int, ...], dtype: torch.dtype, name: str
) -> Case | None:
    """The operand with these placements, or None where they do not fit it."""
    placements = placements_named(name)
    own = operand.dtype or dtype
    partial = any(isinstance(placement, Partial) for placement in placements)
    if partial and (own is torch.bool or operand.below is not None):
        return None
    try:
        return Case(mesh_shape, placements, operand.shape, own)
    except ValueError:
        return None
