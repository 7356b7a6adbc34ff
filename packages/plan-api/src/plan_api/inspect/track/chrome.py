"""The trace-event format, which chrome://tracing and Perfetto read.

Its definition: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Complete events (X) of one thread have to lie within each other or apart. Those of the host do;
collectives overlap, so each goes to the first thread on which the one before has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from plan_api.inspect.track.events import Call, Collective, Operator

__all__ = ["trace_of"]

_HOST = 0


def trace_of(
    events: Sequence[Operator | Collective], calls: Sequence[Call], model: str, rank: int
) -> dict[str, Any]:
    """The trace as an object for JSON.

    Args:
        events: in the order in which they began.
        calls: the same.
        model: its name.
        rank: the process.
    """
    spans = [_span(one.site or model, _HOST, rank, one) for one in calls]
    spans += [_span(one.name, _HOST, rank, one) for one in events if isinstance(one, Operator)]
    free: list[float] = []  # when the last collective of each thread has ended
    for one in events:
        if isinstance(one, Collective):
            lane = next((at for at, end in enumerate(free) if end <= one.start), len(free))
            free[lane : lane + 1] = [one.start + one.duration]
            spans.append(_span(one.name, 1 + lane, rank, one))
    spans.sort(key=lambda span: (span["ts"], -span["dur"]))
    names = {_HOST: "host"} | {1 + lane: f"collectives {lane}" for lane in range(len(free))}
    about = [_about("process_name", rank, _HOST, f"rank {rank}")]
    about += [_about("thread_name", rank, thread, name) for thread, name in names.items()]
    return {"traceEvents": [*about, *spans], "displayTimeUnit": "ms"}


def _span(name: str, thread: int, rank: int, event: Operator | Collective | Call) -> dict[str, Any]:
    told = {key: value for key, value in asdict(event).items() if value not in ("", None)}
    del told["start"], told["duration"], told["phase"]
    return {
        "name": name,
        "cat": event.phase.value,
        "ph": "X",
        "ts": event.start,
        "dur": event.duration,
        "pid": rank,
        "tid": thread,
        "args": told,
    }


def _about(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
