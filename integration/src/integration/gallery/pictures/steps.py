"""One training step of DDP, FSDP2 and fsdp on 2 gloo ranks, from torch.profiler."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch.profiler import ProfilerActivity, profile, record_function

from integration.gallery.picture import Picture, add_legend, as_png, gallery_figure
from integration.models import LlamaShape, build_model
from integration.report.figures import style_axes
from integration.report.palette import LIGHT
from integration.systems import get_system

SYSTEMS = {"ddp": "DDP", "fsdp2": "FSDP2", "fsdp": "fsdp"}
RANKS = 2
#: The model of the picture, and the tokens of a rank.
SHAPE = LlamaShape(
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=32,
)
TOKENS = (2, 64)
STEPS = 40

FORWARD, BACKWARD, OPTIMIZER, COPY = "forward", "backward", "optimizer", "copy"
ALL_GATHER, REDUCE = "all-gather", "reduction"
_COLOURS = {
    FORWARD: ("forward", LIGHT.series[0]),
    BACKWARD: ("backward", LIGHT.series[2]),
    OPTIMIZER: ("optimizer", LIGHT.series[6]),
    COPY: ("copies in and out", LIGHT.ink),
    ALL_GATHER: ("all-gather", LIGHT.series[1]),
    REDUCE: ("reduce-scatter or all-reduce", LIGHT.series[3]),
}
_LABEL = "exchange: "


@dataclass(frozen=True)
class Bar:
    """One run of work on the host, or one collective, in ms from the start of the step."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class StepTimeline:
    """One step of rank 0: the fastest of those that were profiled.

    Attributes:
        host: work of the main thread; between the bars it waits.
        collectives: from the call to the end of the transfer.
        milliseconds: of the step.
    """

    host: tuple[Bar, ...]
    collectives: tuple[Bar, ...]
    milliseconds: float


@dataclass(frozen=True)
class _Event:
    name: str
    start: int
    end: int
    is_async: bool


def measure(
    shape: LlamaShape = SHAPE, tokens: tuple[int, int] = TOKENS, steps: int = STEPS
) -> dict[str, StepTimeline]:
    """Trains each system on 2 gloo processes and returns the fastest step of its rank 0."""
    from testkit import run_ranks

    return {
        name: run_ranks(_run_rank, RANKS, name, shape, tokens, steps, timeout=300)[0]
        for name in SYSTEMS
    }


def _run_rank(name: str, shape: LlamaShape, tokens: tuple[int, int], steps: int) -> StepTimeline:
    torch.set_num_threads(1)
    model = get_system(name).parallelize(build_model(shape, seed=0), shape, dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    ids = torch.randint(shape.vocab_size, tokens)
    batch = {"input_ids": ids, "labels": ids}

    def step() -> None:
        with record_function("step"):
            with record_function(FORWARD):
                loss = model(**batch).loss
            with record_function(BACKWARD):
                loss.backward()
            with record_function(OPTIMIZER):
                optimizer.step()
                optimizer.zero_grad()

    with _named_exchanges():
        for _ in range(2):  # FSDP2 and DDP plan in the first steps
            step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                dist.barrier()
                step()
    events = [
        _Event(each.name(), each.start_ns(), each.start_ns() + each.duration_ns(), each.is_async())
        for each in profiler.profiler.kineto_results.events()
    ]
    spans = [event for event in events if event.name == "step"]
    fastest = min(spans, key=lambda event: event.end - event.start)
    # A transfer's thread may record its end after the step, which has waited for the result.
    inside = (event for event in events if fastest.start <= event.start <= fastest.end)
    return _step_of(replace(event, end=min(event.end, fastest.end)) for event in inside)


@contextmanager
def _named_exchanges() -> Iterator[None]:
    """Names dbuffer's exchanges in the profile, which has only their sends and receives."""
    from dbuffer.collectives import Exchange

    def named(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(_LABEL + name):
                return collective(*args, **kwargs)

        return call

    gather, reduce = Exchange.all_gather, Exchange.reduce_scatter
    with (
        mock.patch.object(Exchange, "all_gather", named(ALL_GATHER, gather)),
        mock.patch.object(Exchange, "reduce_scatter", named(REDUCE, reduce)),
    ):
        yield


def _step_of(events: Iterable[_Event]) -> StepTimeline:
    events = sorted(events, key=lambda event: (event.start, -event.end))
    (step,) = (event for event in events if event.name == "step")
    # autograd's workers have no phase of their own: the phase of an operator is by time.
    phases = [event for event in events if event.name in (FORWARD, BACKWARD, OPTIMIZER)]
    exchanges = [event for event in events if event.name.startswith(_LABEL)]
    host: list[Bar] = []
    found: list[Bar] = []
    end, first = 0, step.start
    messages: dict[_Event, list[_Event]] = {}
    for event in events:
        if event.is_async and event.name in ("gloo:send", "gloo:recv"):
            messages.setdefault(_around(event, exchanges), []).append(event)
        elif event.is_async:
            kind = ALL_GATHER if "gather" in event.name else REDUCE
            if "broadcast" not in event.name:
                found.append(_bar(kind, event.start, event.end, first))
        elif event.name.startswith(("aten::", "fsdp::")) and event.start >= end:
            kind = COPY if event.name.startswith("fsdp::") else _around(event, phases).name
            host.append(_bar(kind, event.start, event.end, first))
            end = event.end
    for exchange, sent in messages.items():
        kind = exchange.name.removeprefix(_LABEL)
        last = max(each.end for each in sent)
        found.append(_bar(kind, min(each.start for each in sent), last, first))
    found.sort(key=lambda bar: bar.start)
    return StepTimeline(tuple(_merged(host)), tuple(found), (step.end - step.start) / 1e6)


def _around(event: _Event, spans: list[_Event]) -> _Event:
    return next(span for span in spans if span.start <= event.start <= span.end)


def _bar(kind: str, start: int, end: int, first: int) -> Bar:
    return Bar(kind, (start - first) / 1e6, (end - first) / 1e6)


def _merged(bars: Iterable[Bar], gap: float = 0.05) -> Iterator[Bar]:
    """Joins neighbours of one kind between which less than ``gap`` ms are Python."""
    current: Bar | None = None
    for bar in bars:
        if current and bar.kind == current.kind and bar.start - current.end < gap:
            current = Bar(bar.kind, current.start, bar.end)
            continue
        if current:
            yield current
        current = bar
    if current:
        yield current


def _lanes(bars: Iterable[Bar]) -> list[tuple[int, Bar]]:
    """Returns bars with the first line on which the previous one has ended."""
    ends: list[float] = []
    placed: list[tuple[int, Bar]] = []
    for bar in bars:
        lane = next((at for at, end in enumerate(ends) if end <= bar.start), len(ends))
        ends[lane : lane + 1] = [bar.end]
        placed.append((lane, bar))
    return placed


def _draw_panel(axes: Axes, title: str, step: StepTimeline) -> None:
    style_axes(axes, LIGHT, f"{title}: {step.milliseconds:.0f} ms", grid_axis="x")
    lanes = _lanes(step.collectives)
    for row, bar in [(0, bar) for bar in step.host] + [(1 + lane, bar) for lane, bar in lanes]:
        axes.barh(row, bar.end - bar.start, left=bar.start, height=0.86, linewidth=0,
                  color=_COLOURS[bar.kind][1])  # fmt: skip
    count = 2 + max(lane for lane, _ in lanes)
    axes.set_yticks(range(count), ["host", "collectives", *[""] * (count - 2)])
    axes.set_ylim(count - 0.5, -0.5)


def draw_steps(steps: dict[str, StepTimeline]) -> bytes:
    """Draws a panel per system on one time axis."""
    heights = [2 + max(lane for lane, _ in _lanes(step.collectives)) for step in steps.values()]
    figure = gallery_figure(0.32 * sum(heights) + 0.65 * len(steps) + 0.9)
    panels = figure.subplots(len(steps), 1, sharex=True, height_ratios=heights)
    for axes, (name, step) in zip(panels, steps.items(), strict=True):
        _draw_panel(axes, SYSTEMS[name], step)
    panels[-1].set_xlim(0, max(step.milliseconds for step in steps.values()))
    panels[-1].set_xlabel("ms")
    add_legend(figure, dict(_COLOURS.values()), columns=3)
    return as_png(figure)


PICTURE = Picture("steps.png", lambda: draw_steps(measure()))
