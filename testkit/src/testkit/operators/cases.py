"""Calls for tests of DTensor dispatch: the operators of the table, on a mesh, with placements."""

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
    """A call of an operator on a mesh, with placements and a dtype.

    Attributes:
        operator: the function to call.
        dtype: of the operands for which the operator does not define one.
        operands: the case of each operand.
    """

    operator: OpEntry
    dtype: torch.dtype
    operands: tuple[Case, ...]

    def __str__(self) -> str:
        """Returns the test id, e.g. ``mul scalar-mesh2x2-S0.R-f32``."""
        mesh = "x".join(map(str, self.mesh_shape))
        placements = ",".join(str(operand).split("-")[1] for operand in self.operands)
        return f"{self.operator.name}-mesh{mesh}-{placements}-{SHORT[self.dtype]}"

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The size of each mesh axis."""
        return self.operands[0].mesh_shape

    def differentiable(self) -> list[bool]:
        """Returns whether each operand can require a gradient."""
        return [
            operand.differentiable and case.dtype.is_floating_point
            for operand, case in zip(self.operator.operands, self.operands, strict=True)
        ]

    def inputs(self, mesh: DeviceMesh) -> list[DTensor]:
        """Makes the operands as DTensors without communication, with the same values in each call.

        Args:
            mesh: of `mesh_shape`, real or fake.

        Returns:
            leaves that do not require gradients.
        """
        tensors = []
        for seed, (operand, case) in enumerate(
            zip(self.operator.operands, self.operands, strict=True)
        ):
            tensor = case.tensor(seed)
            if operand.below is not None:
                tensor = tensor.abs() % operand.below
            tensors.append(case.distribute(mesh, tensor))
        return tensors


def operator_cases(
    mesh_shape: tuple[int, ...], only: Collection[str] | None = None
) -> list[OperatorCase]:
    """Returns the calls of the operators on a mesh, in the table's order.

    In the first of its dtypes an operator is called with one placement for all operands, with the
    first operand replicated, and with another placement of the first operand; in the other dtypes
    with all operands sharded on their first dim.

    Args:
        mesh_shape: of one or two axes, such as ``(4,)``.
        only: names of operators; None for all. On two axes torch takes about 50 ms to propagate the
            sharding of one new call.

    Raises:
        ValueError: the mesh has more than two axes, or an operator is unknown.
    """
    if len(mesh_shape) > 2:
        raise ValueError(f"operator_cases: expected mesh_shape= of 1 or 2 axes, got {mesh_shape}")
    if unknown := set(only or ()) - {operator.name for operator in OPERATORS}:
        raise ValueError(f"operator_cases: expected only= of the table, got {sorted(unknown)} too")
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
    """Returns the operands of an operator for every choice of placements."""
    names = (_ONE_AXIS if len(mesh_shape) == 1 else _TWO_AXES).split()
    choices: list[list[Case]] = []
    for operand in operator.operands:
        own = [".".join(operand.fixed * len(mesh_shape))] if operand.fixed else names
        rows = [_case(operand, mesh_shape, dtype, name) for name in own]
        choices.append([row for row in rows if row is not None])
    if dtype is not operator.dtypes[0]:
        return [tuple(_named(rows, names[1]) for rows in choices)]
    rows_of_operands: dict[tuple[Case, ...], None] = {}
    for position, name in enumerate(names):
        same = [_named(rows, name) for rows in choices]
        others = [_named(rows, names[position - 1]) for rows in choices]
        rows_of_operands |= dict.fromkeys(
            (tuple(same), (choices[0][0], *same[1:]), (same[0], *others[1:]))
        )
    return list(rows_of_operands)


def _named(rows: list[Case], name: str) -> Case:
    """Returns the row with these placements, or the first, which is replicated."""
    placements = placements_named(name)
    return next((row for row in rows if row.placements == placements), rows[0])


def _case(
    operand: OpInput, mesh_shape: tuple[int, ...], dtype: torch.dtype, name: str
) -> Case | None:
    """Returns the operand with these placements, or None if they do not fit it."""
    placements = placements_named(name)
    own = operand.dtype or dtype
    partial = any(isinstance(placement, Partial) for placement in placements)
    if partial and (own is torch.bool or operand.below is not None):
        return None
    try:
        return Case(mesh_shape, placements, operand.shape, own)
    except ValueError:
        return None
