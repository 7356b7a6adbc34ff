"""The calls of one tensor-parallel LLaMA layer under three dispatchers, from torch.profiler."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from integration.gallery.picture import Picture, add_legend, as_png, gallery_figure
from integration.report.figures import style_axes
from integration.report.palette import LIGHT

RANKS = 2
STEPS = 60
MODES = {
    "native": "Eager mode, torch's DTensor dispatch",
    "rules": "Eager mode, dtensor-rules",
    "static": "Static mode",
}
OPERATOR, COLLECTIVE, DTENSOR, PLAN, PYTHON = "operator", "collective", "dtensor", "plan", "python"
_COLOURS = {
    PYTHON: ("model and autograd in Python", LIGHT.reference),
    PLAN: ("hooks of plan-api", LIGHT.series[2]),
    DTENSOR: ("DTensor in Python", LIGHT.series[3]),
    OPERATOR: ("operators", LIGHT.series[0]),
    COLLECTIVE: ("collectives", LIGHT.series[1]),
}
_DISPATCH = ("torch/distributed/tensor/", "dtensor_rules/")
# Calls of torch that belong to what their caller does.
_NEUTRAL = ("torch/_ops.py", "torch/_library/", "torch/_compile.py", "torch/_dynamo/")
# Calls shorter than this share of the step would be narrower than a pixel.
LEAST_SHARE = 1 / 2500


@dataclass(frozen=True)
class StackFrame:
    """One call of rank 0, in ms from the start of the step.

    Attributes:
        depth: of the stack below the step.
    """

    kind: str
    depth: int
    start: float
    end: float


@dataclass(frozen=True)
class ProfiledStep:
    """One forward and backward of rank 0.

    Attributes:
        calls: the fastest of the profiled steps.
        profiled: its duration in ms; the profiler records every Python call, which takes time.
        unprofiled: the duration in ms of the fastest step without the profiler.
    """

    calls: tuple[StackFrame, ...]
    profiled: float
    unprofiled: float


def measure(steps: int = STEPS, least_share: float = LEAST_SHARE) -> dict[str, ProfiledStep]:
    """Runs a layer of LLaMA on 2 gloo processes in each mode.

    Args:
        steps: of each mode with the profiler, and five times as many without it.
        least_share: of the step's duration that a call takes to be in the result.
    """
    from testkit import run_ranks

    found: list[dict[str, ProfiledStep]] = run_ranks(
        _run_rank, RANKS, steps, least_share, timeout=300
    )
    return found[0]


def _run_rank(steps: int, least_share: float) -> dict[str, ProfiledStep]:
    import dtensor_rules
    from plan_api import parallelize, zoo
    from testkit import models

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    ids = torch.randint(models.VOCABULARY, (2, 16))
    found: dict[str, ProfiledStep] = {}
    for mode in MODES:
        model = models.llama(num_hidden_layers=1)
        is_static = mode == "static"
        parallelize(model, zoo.llama(mesh), mode="static" if is_static else "eager", guard_steps=0)

        def step(model: torch.nn.Module = model) -> None:
            model(input_ids=ids, labels=ids).loss.backward()

        dtensor_rules.disable()
        with nullcontext() if mode == "native" else dtensor_rules.enabled():
            found[mode] = _measure(step, steps, least_share)
    return found


def _measure(step: Callable[[], None], steps: int, least_share: float) -> ProfiledStep:
    for _ in range(3):
        step()
    seconds: list[float] = []
    for _ in range(5 * steps):  # they are short
        dist.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    fastest: ProfiledStep | None = None
    for _ in range(steps):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
            step()
        tree = profiler.profiler.kineto_results.experimental_event_tree()
        root = next(node for top in tree for node in _all(top) if node.name.endswith(": step"))
        if fastest is None or root.duration_time_ns / 1e6 < fastest.profiled:
            total = root.duration_time_ns
            calls = tuple(_calls(root, root.start_time_ns, total * least_share))
            fastest = ProfiledStep(calls, total / 1e6, min(seconds) * 1e3)
    assert fastest is not None
    return fastest


def _all(node: Any) -> Iterator[Any]:
    yield node
    for child in node.children:
        yield from _all(child)


def _calls(root: Any, first: int, least: float) -> Iterator[StackFrame]:
    """Yields the Python calls and operators below a node that are long enough to be seen."""
    stack = [(child, 0, PYTHON) for child in root.children]
    while stack:
        node, depth, caller = stack.pop()
        kind = _kind(node, caller)
        if node.duration_time_ns < least:
            continue
        if kind is None:
            stack += [(child, depth, caller) for child in node.children]
            continue
        start = node.start_time_ns - first
        yield StackFrame(kind, depth, start / 1e6, (start + node.duration_time_ns) / 1e6)
        stack += [(child, depth + 1, kind) for child in node.children]


def _kind(node: Any, caller: str) -> str | None:
    """Returns the kind of a call; None for C functions, of which only what they call is shown."""
    tag, name = node.tag.name, node.name
    if tag == "PyCCall":
        return None
    if caller == COLLECTIVE or "functional_collectives.py" in name:
        return COLLECTIVE  # the call of one, or waiting for it
    if name.startswith(_NEUTRAL):
        return caller
    if tag == "PyCall":
        if name.startswith(_DISPATCH) or "/dtensor_rules/" in name:
            return DTENSOR
        return PLAN if "plan_api/" in name else PYTHON
    if name.startswith(("c10d::", "_c10d_functional::", "gloo:")):
        return COLLECTIVE
    if name == "PythonSubclass":
        return DTENSOR
    return OPERATOR if name.startswith("aten::") else PYTHON


def _draw_panel(axes: Axes, title: str, step: ProfiledStep) -> None:
    style_axes(axes, LIGHT, f"{title}: {step.unprofiled:.1f} ms", grid_axis="x")
    by_kind: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for call in step.calls:
        spans = by_kind.setdefault((call.kind, call.depth), [])
        spans.append((call.start, call.end - call.start))
    for (kind, depth), spans in by_kind.items():
        axes.broken_barh(spans, (depth, 0.94), facecolor=_COLOURS[kind][1], linewidth=0)
    axes.set_yticks(())
    axes.set_ylim(1 + max(call.depth for call in step.calls), -0.2)


def draw_flames(steps: dict[str, ProfiledStep]) -> bytes:
    """Draws a panel per mode on one time axis, callers above the calls that they make."""
    heights = [6 + max(call.depth for call in step.calls) for step in steps.values()]
    figure = gallery_figure(0.062 * sum(heights) + 0.5 * len(steps) + 0.9)
    panels = figure.subplots(len(steps), 1, sharex=True, height_ratios=heights)
    for axes, (mode, step) in zip(panels, steps.items(), strict=True):
        _draw_panel(axes, MODES[mode], step)
    panels[-1].set_xlim(0, max(step.profiled for step in steps.values()))
    panels[-1].set_xlabel("ms under the profiler")
    add_legend(figure, dict(_COLOURS.values()), columns=3)
    return as_png(figure)


PICTURE = Picture("flame.png", lambda: draw_flames(measure()))
