"""A recorded step: its events as a table, as JSON, and as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import torch.distributed as dist

from plan_api.inspect.track.events import CallEvent, CollectiveEvent, OperatorEvent

__all__ = ["EventRow", "Record", "chrome_trace"]

_VERSION = 1
_RIGHT_ALIGNED = ("bytes", "us")
_HOST_THREAD = 0


@dataclass(frozen=True)
class EventRow:
    """One event as text; see `OperatorEvent` and `CollectiveEvent`.

    Attributes:
        phase: of the step.
        site: the model itself is ``(model)``; empty outside of the model.
        what: the operator or the collective.
        placed: placements before and after.
        bytes: on this rank.
        axis: the mesh axis and its size.
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
    """What `track` recorded on this rank; `str` returns a table, and `table` one for rich.

    Args:
        model: the name of its class.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._events: tuple[OperatorEvent | CollectiveEvent, ...] | None = None
        self._calls: tuple[CallEvent, ...] = ()

    @property
    def events(self) -> tuple[OperatorEvent | CollectiveEvent, ...]:
        """Operators and collectives, in the order in which they began.

        Raises:
            RuntimeError: the block has not ended.
        """
        if self._events is None:
            raise RuntimeError("track: no record yet; read it after the `with` block has ended")
        return self._events

    @property
    def operators(self) -> tuple[OperatorEvent, ...]:
        """The operators among the events."""
        return tuple(event for event in self.events if isinstance(event, OperatorEvent))

    @property
    def collectives(self) -> tuple[CollectiveEvent, ...]:
        """The collectives among the events."""
        return tuple(event for event in self.events if isinstance(event, CollectiveEvent))

    @property
    def calls(self) -> tuple[CallEvent, ...]:
        """Calls of modules, in the order in which they began."""
        return self._calls

    def rows(self, *, collectives_only: bool = False) -> tuple[EventRow, ...]:
        """Returns the events as text.

        Args:
            collectives_only: whether to leave operators out.
        """
        return tuple(map(_row, self.collectives if collectives_only else self.events))

    def __str__(self) -> str:
        cells = [
            [field.name for field in fields(EventRow)],
            *(list(astuple(row)) for row in self.rows()),
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(_aligned(row, widths) for row in cells)

    def table(self, *, collectives_only: bool = False) -> object:
        """Returns a `rich.table.Table`.

        Args:
            collectives_only: whether to leave operators out.

        Raises:
            ImportError: rich is not installed (`pip install plan-api[report]`).
        """
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for field in fields(EventRow):
            is_right = field.name in _RIGHT_ALIGNED
            table.add_column(field.name, justify="right" if is_right else "left")
        for row in self.rows(collectives_only=collectives_only):
            table.add_row(*map(Text, astuple(row)))  # Text, as [0] would be markup
        return table

    def to_json(self) -> str:
        """Returns the record as JSON, an object per event, with ``kind`` operator or collective."""
        events = [
            {"kind": "operator" if isinstance(event, OperatorEvent) else "collective"}
            | asdict(event)
            | {"phase": event.phase.value}
            for event in self.events
        ]
        calls = [asdict(call) | {"phase": call.phase.value} for call in self.calls]
        header: dict[str, Any] = {"version": _VERSION, "model": self.model, "rank": self.rank}
        return json.dumps(header | {"events": events, "calls": calls}, indent=1) + "\n"

    def to_chrome_trace(self) -> str:
        """Returns JSON for chrome://tracing and ui.perfetto.dev.

        The process is the rank. Its first thread is the host, with modules around operators; the
        others are collectives, as many as were in flight at once.
        """
        return json.dumps(chrome_trace(self.events, self.calls, self.model, self.rank)) + "\n"

    def _set(
        self, events: tuple[OperatorEvent | CollectiveEvent, ...], calls: tuple[CallEvent, ...]
    ) -> None:
        self._events, self._calls = events, calls


def _row(event: OperatorEvent | CollectiveEvent) -> EventRow:
    site = "(model)" if event.site == "" else event.site or ""
    placed = f"{event.before} -> {event.after}" if event.before or event.after else ""
    axis, why = "", ""
    if isinstance(event, CollectiveEvent):
        size = "" if event.ranks is None else f"of {event.ranks}"
        axis, why = f"{event.axis} {size}".strip(), event.line or event.cause
    return EventRow(
        event.phase.value, site, event.name, placed, str(event.bytes), axis,
        f"{event.duration:.0f}", why,
    )  # fmt: skip


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    names = [field.name for field in fields(EventRow)]
    padded = [
        cell.rjust(width) if name in _RIGHT_ALIGNED else cell.ljust(width)
        for name, cell, width in zip(names, cells, widths, strict=True)
    ]
    return "  ".join(padded).rstrip()


def chrome_trace(
    events: Sequence[OperatorEvent | CollectiveEvent],
    calls: Sequence[CallEvent],
    model: str,
    rank: int,
) -> dict[str, Any]:
    """Returns a trace in the trace event format, which chrome://tracing and Perfetto read.

    Complete events (X) of one thread have to nest or be disjoint. Those of the host are;
    collectives overlap, so each is on the first thread on which the previous one has ended. The
    format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

    Args:
        events: in the order in which they began.
        calls: in the order in which they began.
        model: the name of its class.
        rank: the process.
    """
    spans = [_span(call.site or model, _HOST_THREAD, rank, call) for call in calls]
    spans += [
        _span(event.name, _HOST_THREAD, rank, event)
        for event in events
        if isinstance(event, OperatorEvent)
    ]
    ends: list[float] = []  # of the last collective of each thread
    for one in events:
        if isinstance(one, CollectiveEvent):
            lane = next((at for at, end in enumerate(ends) if end <= one.start), len(ends))
            ends[lane : lane + 1] = [one.start + one.duration]
            spans.append(_span(one.name, 1 + lane, rank, one))
    spans.sort(key=lambda span: (span["ts"], -span["dur"]))
    names = {_HOST_THREAD: "host"} | {1 + lane: f"collectives {lane}" for lane in range(len(ends))}
    metadata = [_metadata("process_name", rank, _HOST_THREAD, f"rank {rank}")]
    metadata += [_metadata("thread_name", rank, thread, name) for thread, name in names.items()]
    return {"traceEvents": [*metadata, *spans], "displayTimeUnit": "ms"}


def _span(
    name: str, thread: int, rank: int, event: OperatorEvent | CollectiveEvent | CallEvent
) -> dict[str, Any]:
    arguments = {key: value for key, value in asdict(event).items() if value not in ("", None)}
    del arguments["start"], arguments["duration"], arguments["phase"]
    return {
        "name": name,
        "cat": event.phase.value,
        "ph": "X",
        "ts": event.start,
        "dur": event.duration,
        "pid": rank,
        "tid": thread,
        "args": arguments,
    }


def _metadata(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
