"""A recorded step: its events as a table, as JSON, and as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import torch.distributed as dist

from plan_api.inspect.track.chrome import trace_of
from plan_api.inspect.track.events import Call, Collective, Operator

__all__ = ["Record", "Row"]

_VERSION = 1


@dataclass(frozen=True)
class Row:
    """One event, in words; see `Operator` and `Collective`.

    Attributes:
        phase: of the step.
        site: the model itself is ``(model)``, and what has none is empty.
        what: the operator or the collective.
        placed: before and after.
        bytes: on this rank.
        axis: and its size.
        us: microseconds.
        why: the line of the plan, or the cause.
    """

    phase: str
    site: str
    what: str
    placed: str
    bytes: str
    axis: str
    us: str
    why: str


class Record:
    """What `track` saw on this rank; `str` makes a table, and `table` one for rich.

    Args:
        model: its name.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._events: tuple[Operator | Collective, ...] | None = None
        self._calls: tuple[Call, ...] = ()

    @property
    def events(self) -> tuple[Operator | Collective, ...]:
        """Operators and collectives, in the order in which they began.

        Raises:
            RuntimeError: the block has not ended.
        """
        if self._events is None:
            raise RuntimeError("track: no record yet; read it after the `with` block has ended")
        return self._events

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Those among the events."""
        return tuple(one for one in self.events if isinstance(one, Operator))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Those among the events."""
        return tuple(one for one in self.events if isinstance(one, Collective))

    @property
    def calls(self) -> tuple[Call, ...]:
        """Calls of modules, in the order in which they began."""
        return self._calls

    def rows(self, *, collectives_only: bool = False) -> tuple[Row, ...]:
        """The events, in words.

        Args:
            collectives_only: whether operators are left out.
        """
        return tuple(map(_row, self.collectives if collectives_only else self.events))

    def __str__(self) -> str:
        cells = [
            [field.name for field in fields(Row)],
            *(list(astuple(row)) for row in self.rows()),
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(_line(row, widths) for row in cells)

    def table(self, *, collectives_only: bool = False) -> object:
        """A `rich.table.Table`.

        Args:
            collectives_only: whether operators are left out.

        Raises:
            ImportError: rich is not installed (`pip install plan-api[report]`).
        """
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for field in fields(Row):
            table.add_column(field.name, justify="right" if field.name in _NUMBERS else "left")
        for row in self.rows(collectives_only=collectives_only):
            table.add_row(*map(Text, astuple(row)))  # as it is: [0] is no markup
        return table

    def to_json(self) -> str:
        """All of it, one object per event, with ``kind`` operator or collective."""
        events = [
            {"kind": type(one).__name__.lower()} | asdict(one) | {"phase": one.phase.value}
            for one in self.events
        ]
        calls = [asdict(one) | {"phase": one.phase.value} for one in self.calls]
        whole: dict[str, Any] = {"version": _VERSION, "model": self.model, "rank": self.rank}
        return json.dumps(whole | {"events": events, "calls": calls}, indent=1) + "\n"

    def to_chrome_trace(self) -> str:
        """JSON for chrome://tracing and ui.perfetto.dev.

        The process is the rank. Its first thread is the host, with modules around operators; the
        others are collectives, as many as were under way at once.
        """
        return json.dumps(trace_of(self.events, self.calls, self.model, self.rank)) + "\n"

    def _set(self, events: tuple[Operator | Collective, ...], calls: tuple[Call, ...]) -> None:
        self._events, self._calls = events, calls


_NUMBERS = ("bytes", "us")


def _row(event: Operator | Collective) -> Row:
    site = "(model)" if event.site == "" else event.site or ""
    placed = f"{event.before} -> {event.after}" if event.before or event.after else ""
    axis, why = "", ""
    if isinstance(event, Collective):
        size = "" if event.ranks is None else f"of {event.ranks}"
        axis, why = f"{event.axis} {size}".strip(), event.line or event.cause
    return Row(
        event.phase.value, site, event.name, placed, str(event.bytes), axis,
        f"{event.duration:.0f}", why,
    )  # fmt: skip


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    names = [field.name for field in fields(Row)]
    shown = [
        cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
        for name, cell, width in zip(names, cells, widths, strict=True)
    ]
    return "  ".join(shown).rstrip()
