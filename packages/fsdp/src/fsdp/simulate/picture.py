"""Simulations as a picture: stacked bars of memory by kind, and of a step's time, as SVG.

Colours are Okabe and Ito's, which most colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from fsdp.simulate.memory import InStep
from fsdp.simulate.report import seconds, size

if TYPE_CHECKING:
    from fsdp.simulate.simulation import Simulation

__all__ = ["draw"]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#999999", "#56B4E9", "#D55E00", "#CC79A7")
LEFT, WIDTH, BAR, PITCH = 130, 560, 16, 24  # pixels
PER_ROW = 4  # entries of a legend


def draw(simulations: Sequence[Simulation]) -> str:
    """The SVG: a bar for each, of memory at the peak; below, of time where all have one."""
    top, parts = 10.0, []
    bars = {str(one.mesh): _memory(one) for one in simulations}
    text, top = _chart("memory of a rank at the peak of a step", bars, size, top)
    parts.append(text)
    if all(one.time is not None for one in simulations):
        bars = {str(one.mesh): _time(one) for one in simulations}
        text, top = _chart("time of a step", bars, seconds, top + 14)
        parts.append(text)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 90}" height="{top:.0f}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _memory(one: Simulation) -> dict[str, float]:
    memory, worst = one.memory, one.memory.worst
    if memory.peak == memory.resident:  # more than at any moment of forward and backward
        worst = InStep(gradients=memory.gradients)
    return {
        "parameters": memory.parameters, "gradients": worst.gradients,
        "optimizer": memory.optimizer, "buffers": memory.buffers, "gathered": worst.gathered,
        "being reduced": worst.reducing, "activations": worst.activations,
    }  # fmt: skip


def _time(one: Simulation) -> dict[str, float]:
    time = one.time
    assert time is not None
    return {
        "compute": time.compute, "wait for gathers": time.gather,
        "wait for reductions": time.reduce, "optimizer": time.update,
        "other": time.other,
    }  # fmt: skip


def _chart(
    title: str, bars: dict[str, dict[str, float]], words: Callable[[float], str], top: float
) -> tuple[str, float]:
    """One chart, and where it ends; the longest bar is as wide as the chart."""
    kinds = list(next(iter(bars.values())))
    longest = max(sum(bar.values()) for bar in bars.values()) or 1.0
    parts = [_text(10, top + 12, title, weight="bold")]
    top += 24
    for place, kind in enumerate(kinds):
        left, y = 10 + 165 * (place % PER_ROW), top + 18 * (place // PER_ROW)
        parts += [_box(left, y, 11, 11, COLOURS[place]), _text(left + 16, y + 10, kind)]
    top += 18 * -(-len(kinds) // PER_ROW) + 8
    for name, bar in bars.items():
        x = float(LEFT)
        parts.append(_text(LEFT - 8, top + BAR - 4, name, "end"))
        for place, value in enumerate(bar.values()):
            width = WIDTH * value / longest
            parts.append(_box(x, top, width, BAR, COLOURS[place]))
            x += width
        parts.append(_text(x + 6, top + BAR - 4, words(sum(bar.values()))))
        top += PITCH
    return "".join(parts), top


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )
