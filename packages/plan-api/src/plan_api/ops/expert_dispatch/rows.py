"""Exchanges rows of tensors by all-to-alls with uneven splits, which run while ranks compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from plan_api.lowering.ir import SiteStep
from plan_api.runtime.attribution import moving
from plan_api.runtime.policies.kept_exchanges import exchanged
from plan_api.spec.axes import axis_names

__all__ = ["ExchangeGroup", "RowFormat", "Transfer"]


@dataclass(frozen=True)
class ExchangeGroup:
    """The ranks that exchange rows.

    Attributes:
        name: of the process group.
        step: of the plan.
    """

    name: str
    step: SiteStep

    @classmethod
    def along(cls, axes: Sequence[int], mesh: DeviceMesh, step: SiteStep) -> ExchangeGroup:
        """Returns the group of all ranks along axes, the first axis outermost; all have to call."""
        if len(axes) == 1:
            return cls(mesh.get_group(axes[0]).group_name, step)
        names = axis_names(mesh)
        flattened = mesh[tuple(names[axis] for axis in axes)]._flatten()
        return cls(flattened.get_group().group_name, step)

    def start(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Starts an all-to-all; returns the rows that `wait` waits for, from all ranks in order.

        Args:
            rows: of any shape but for the first dim, sorted by rank.
            sent: rows for each rank.
            received: rows from each rank.
        """

        def start() -> torch.Tensor:
            in_flight: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(
                rows.contiguous(), [*received], [*sent], self.name
            )
            return in_flight

        with moving(self.step, (), ()):
            return exchanged(start)

    def wait(self, in_flight: torch.Tensor) -> torch.Tensor:
        """Waits for rows: the current stream does, and on CPUs the host."""
        with moving(self.step, (), ()):
            rows: torch.Tensor = torch.ops._c10d_functional.wait_tensor(in_flight)
        return rows

    def _waits_for_(self) -> str:
        """Describes what is waited for, for `fused_comm.diagnosis`."""
        return f"plan-api: tokens sent to the ranks of their experts, {self.step.description}"


class Transfer:
    """An all-to-all that one autograd function starts, and the next one waits for.

    In backward the second one sends the gradients back, and the first one receives them. What runs
    between them overlaps with the transfer.

    Args:
        sent: rows for each rank, in forward.
        received: rows from each rank, in forward.
        group: of the ranks.
    """

    def __init__(self, sent: Sequence[int], received: Sequence[int], group: ExchangeGroup) -> None:
        self._sent, self._received, self._group = sent, received, group
        self._in_flight: torch.Tensor | None = None

    def send(self, rows: torch.Tensor) -> None:
        """Starts to send rows in forward."""
        self._in_flight = self._group.start(rows, self._sent, self._received)

    def send_back(self, rows: torch.Tensor) -> None:
        """Starts to send gradients of received rows in backward."""
        self._in_flight = self._group.start(rows, self._received, self._sent)

    def receive(self) -> torch.Tensor:
        """Waits for what was sent last, and returns what this rank receives."""
        in_flight, self._in_flight = self._in_flight, None
        assert in_flight is not None, "nothing was sent"
        return self._group.wait(in_flight)


@dataclass(frozen=True)
class RowFormat:
    """The bytes of one row of several tensors (rows, columns), the widest dtype first.

    Attributes:
        dtypes: of the tensors.
        columns: the bytes of each.
        width: of a row, a multiple of the widest dtype's, so that all are aligned.
    """

    dtypes: tuple[torch.dtype, ...]
    columns: tuple[slice, ...]
    width: int

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor]) -> RowFormat:
        """Returns the format of rows of these tensors."""
        columns, end = [slice(0)] * len(parts), 0
        for at in sorted(range(len(parts)), key=lambda at: -parts[at].itemsize):
            start, end = end, end + parts[at].shape[1] * parts[at].itemsize
            columns[at] = slice(start, end)
        widest = max((part.itemsize for part in parts), default=1)
        width = -(-end // widest) * widest
        return cls(tuple(part.dtype for part in parts), tuple(columns), width)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns (rows, width), uint8, or the only part itself."""
        if len(parts) == 1:
            return parts[0]
        rows = parts[0].new_empty(len(parts[0]), self.width, dtype=torch.uint8)
        rows[:, max(place.stop for place in self.columns) :] = 0
        for part, own in zip(parts, self.split(rows), strict=True):
            own.copy_(part)
        return rows

    def split(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of joined rows as the tensors."""
        if len(self.dtypes) == 1:
            return [rows]
        places = zip(self.columns, self.dtypes, strict=True)
        return [rows[:, place].view(dtype) for place, dtype in places]
