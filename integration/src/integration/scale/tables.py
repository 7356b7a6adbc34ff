"""What the report's tables say, as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from integration.scale.cost import Machine
from integration.scale.simulation import Scale
from integration.scale.traffic import AxisTraffic

__all__ = ["ReportTable", "tables_of"]


@dataclass(frozen=True)
class ReportTable:
    """A table.

    Attributes:
        title: above it.
        columns: their heads.
        rows: cells, the first of each a name.
        note: below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def tables_of(scale: Scale, machine: Machine) -> list[ReportTable]:
    """The tables of a report, those of what was left out left out."""
    tables = [_steps(scale, machine), _paddings(scale)]
    if scale.initialisations:
        tables.append(_beginnings(scale))
    if scale.dispatches:
        tables.append(_dispatches(scale))
    return tables


def _steps(scale: Scale, machine: Machine) -> ReportTable:
    rows = []
    for one, time in zip(scale.counts, scale.times, strict=True):
        sent = _sent(one.whole.traffic)
        state = one.whole.parameters * 4  # gradients and AdamW's two states are as large
        rows.append(
            (
                one.model, one.way, f"{one.ranks:,}", *(sent[op] for op in _OPS),
                f"{one.whole.flops / 1e12:,.0f}",
                f"{state / 1e9:,.1f}" + ("" if state <= machine.memory else " (does not fit)"),
                f"{time.compute:.2f}", f"{time.tensor:.2f}", f"{time.data:.2f}",
            )
        )  # fmt: skip
    return ReportTable(
        "A step of a rank, counted and predicted",
        ("model", "way", "ranks", *_OPS.values(), "TFLOP", "states, GB", "computes, s",
         "waits for TP, s", "waits for the rest, s"),
        tuple(rows),
        "Collectives of one sequence for each rank with data of its own: how many, and the GB that "
        "the rank sends to others. States: parameters, gradients and AdamW's two moments, without "
        "activations. Seconds are predicted, of as many tokens as weak scaling has.",
    )  # fmt: skip


_OPS = {
    "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters",
    "all_reduce": "all-reduces",
}


def _sent(traffic: Sequence[AxisTraffic]) -> dict[str, str]:
    calls: defaultdict[str, int] = defaultdict(int)
    nbytes: defaultdict[str, int] = defaultdict(int)
    for one in traffic:
        calls[one.op] += one.calls
        nbytes[one.op] += one.nbytes
    return {op: f"{calls[op]:,}: {nbytes[op] / 1e9:,.2f}" if calls[op] else "" for op in _OPS}


def _paddings(scale: Scale) -> ReportTable:
    worlds = sorted({one.ranks for one in scale.paddings})
    found = {(one.model, one.rows, one.ranks): one.share for one in scale.paddings}
    names = list(dict.fromkeys((one.model, one.rows) for one in scale.paddings))
    return ReportTable(
        "Padding of the planner",
        ("model", "rows uncut", *(f"{ranks:,} ranks" for ranks in worlds)),
        tuple(
            (model, str(rows), *(f"{found[model, rows, ranks]:.3%}" for ranks in worlds))
            for model, rows in names
        ),
        "A group per layer, cut over all ranks; tensors as they are published, so that "
        "DeepSeek-V3 has one for each expert. Rows of experts' matrices, or of all.",
    )


def _beginnings(scale: Scale) -> ReportTable:
    return ReportTable(
        "Until the first step",
        ("model", "way", "ranks", "mesh, s", "model on meta, s", "plan and fully_shard, s",
         "memory, MiB"),
        tuple(
            (one.model, one.way, f"{one.ranks:,}", f"{one.mesh:.2f}", f"{one.model_on_meta:.2f}",
             f"{one.distribute:.1f}", f"{one.memory / 2**20:,.0f}")
            for one in scale.initialisations
        ),
        "Rank 0's wall clock and the growth of its process's memory, parameters on meta; nothing "
        "is sent, so rendezvous and the making of communicators are not in it.",
    )  # fmt: skip


def _dispatches(scale: Scale) -> ReportTable:
    return ReportTable(
        "Dispatch of a layer",
        ("model", "way", "ranks", "one device, ms", "by the way, ms", "added, ms"),
        tuple(
            (one.model, one.way, f"{one.ranks:,}", f"{1e3 * one.plain:.1f}",
             f"{1e3 * one.layer:.1f}", f"{1e3 * one.cost:.1f}")
            for one in scale.dispatches
        ),
        "Processor time of forward and backward with tiny widths, so that operators take next to "
        "nothing. On a GPU the host's time runs beside the device's.",
    )  # fmt: skip
