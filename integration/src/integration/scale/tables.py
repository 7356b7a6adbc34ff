"""The sections of the report with tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from integration.report.section import Column, Paragraph, Section, Table
from integration.scale.cost import Machine
from integration.scale.simulation import Scale
from integration.scale.traffic import AxisTraffic

__all__ = ["table_sections"]


def table_sections(scale: Scale, machine: Machine) -> list[Section]:
    """Returns a section per table; measurements that the options leave out have none."""
    tables = [_steps(scale, machine), _paddings(scale)]
    if scale.initialisations:
        tables.append(_beginnings(scale))
    if scale.dispatches:
        tables.append(_dispatches(scale))
    return tables


def _steps(scale: Scale, machine: Machine) -> Section:
    rows = []
    for one, time in zip(scale.counts, scale.times, strict=True):
        sent = _sent(one.whole.traffic)
        state = one.whole.parameters * 4  # gradients and AdamW's two states are as large
        rows.append(
            (
                one.model, one.strategy, f"{one.ranks:,}", *(sent[op] for op in _OPS),
                f"{one.whole.flops / 1e12:,.0f}",
                f"{state / 1e9:,.1f}" + ("" if state <= machine.memory else " (does not fit)"),
                f"{time.compute:.2f}", f"{time.tensor:.2f}", f"{time.data:.2f}",
            )
        )  # fmt: skip
    return _section(
        "A step of a rank, counted and predicted",
        ("model", "strategy", "ranks", *_OPS.values(), "TFLOP", "states, GB", "compute, s",
         "exposed TP, s", "exposed other, s"),
        tuple(rows),
        "Collectives of a step of one sequence per data parallel rank: their number, and the GB "
        "that a rank sends. States: parameters, gradients and AdamW's two moments, with "
        "padding and without activations. Seconds are predicted, for the tokens of weak scaling.",
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


def _paddings(scale: Scale) -> Section:
    worlds = sorted({one.ranks for one in scale.paddings})
    found = {(one.model, one.rows, one.ranks): one.share for one in scale.paddings}
    names = list(dict.fromkeys((one.model, one.rows) for one in scale.paddings))
    return _section(
        "Padding of the planner",
        ("model", "rows per block", *(f"{ranks:,} ranks" for ranks in worlds)),
        tuple(
            (model, str(rows), *(f"{found[model, rows, ranks]:.3%}" for ranks in worlds))
            for model, rows in names
        ),
        "A parameter group per layer, sharded over all ranks, with the published tensors: "
        "DeepSeek-V3 has one for each expert. Blocks of rows of experts' matrices, or of all "
        "matrices.",
    )


def _beginnings(scale: Scale) -> Section:
    return _section(
        "Initialisation",
        ("model", "strategy", "ranks", "mesh, s", "model on meta, s", "plan and fully_shard, s",
         "memory, MiB"),
        tuple(
            (one.model, one.strategy, f"{one.ranks:,}", f"{one.mesh:.2f}",
             f"{one.model_on_meta:.2f}", f"{one.distribute:.1f}", f"{one.memory / 2**20:,.0f}")
            for one in scale.initialisations
        ),
        "Wall-clock time of rank 0 and the growth of its process's memory, with parameters on the "
        "meta device; nothing is sent, so that rendezvous and communicators are not included.",
    )  # fmt: skip


def _dispatches(scale: Scale) -> Section:
    return _section(
        "Dispatch of a layer",
        ("model", "strategy", "ranks", "one device, ms", "strategy, ms", "added, ms"),
        tuple(
            (one.model, one.strategy, f"{one.ranks:,}", f"{1e3 * one.plain:.1f}",
             f"{1e3 * one.layer:.1f}", f"{1e3 * one.cost:.1f}")
            for one in scale.dispatches
        ),
        "CPU time of forward and backward with tiny widths, so that operators take almost no time. "
        "On a GPU host time overlaps with device time.",
    )  # fmt: skip


def _section(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], note: str
) -> Section:
    """Returns a section of a table whose first two columns are names, and a note below it."""
    heads = (Column(text, is_number=place > 1) for place, text in enumerate(columns))
    return Section(title, (Table(tuple(heads), tuple(rows)), Paragraph(note, is_note=True)))
