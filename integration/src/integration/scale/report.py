"""Writes the report of a simulation: report.md, report.html, scale.json and the figures."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as MatplotlibFigure

from integration.report.command_output import to_json
from integration.report.palette import Theme
from integration.report.section import Command, Figure, Paragraph, ReportPage, Section
from integration.report.write import write_report
from integration.scale.figures import (
    draw_beginning,
    draw_growth,
    draw_padding,
    draw_strong,
    draw_traffic,
    draw_weak,
)
from integration.scale.options import ScaleSetup
from integration.scale.simulation import GROWS_ON, Scale
from integration.scale.tables import table_sections

__all__ = ["LIMITS", "as_json", "write_scale"]

LIMITS = (
    "Predicted, not measured, by a cost model with assumed constants. The model leaves out "
    "activation checkpointing, activation memory, the optimizer step, shared switches, slow ranks "
    "and host time. Compute has one efficiency for all shapes; all collectives use rings, at full "
    "bandwidth for every size; forward and backward of a layer hide their collectives together. "
    "FLOPs, including those of attention, and TP traffic are proportional to the tokens. Experts "
    "get equal numbers of tokens. Plans of the zoo are simulated for LLaMA and Mixtral only; "
    "GPT-OSS and DeepSeek-V3 are simulated with fully_shard."
)


def write_scale(setup: ScaleSetup, scale: Scale) -> Path:
    """Writes every file of the report into ``--out``, which exists.

    Returns:
        The path of report.html.
    """
    out = setup.options.out
    (out / "scale.json").write_text(to_json(as_json(setup, scale)) + "\n")
    return write_report(scale_report(setup, scale), out)


def as_json(setup: ScaleSetup, scale: Scale) -> dict[str, Any]:
    """Returns every number of a simulation, for scale.json."""
    return {"machine": asdict(setup.machine), **asdict(scale)}


def scale_report(setup: ScaleSetup, scale: Scale) -> ReportPage:
    """Returns the report of a simulation; measurements that the options leave out have no part."""
    machine = setup.machine
    command = shlex.join(["python", "-m", "integration.scale", *setup.options.command_line()])
    reproduce = Section(
        "Reproduce",
        (
            Command(command),
            Paragraph(
                "Counts and predictions are equal on every machine; measured times and memory are "
                "not. All numbers are in `scale.json`.",
                is_note=True,
            ),
        ),
    )
    return ReportPage(
        title=f"Training on up to {max(setup.worlds):,} ranks, simulated",
        subject=(
            f"One process simulates rank 0 of {', '.join(f'{n:,}' for n in setup.worlds)} ranks "
            "over torch's fake process group. Collectives are counted as fsdp and plan-api issue "
            "them, on tensors without data. The cost model: "
            f"{machine.efficiency:.0%} of {machine.peak / 1e12:,.0f} TFLOP/s; within a node of "
            f"{machine.node} ranks, {machine.inside.bandwidth / 1e9:,.0f} GB/s and "
            f"{machine.inside.latency * 1e6:.1f} us per ring step; between nodes, "
            f"{machine.between.bandwidth / 1e9:,.0f} GB/s per network card of a rank and "
            f"{machine.between.latency * 1e6:.1f} us; collectives of fully_shard overlap with "
            f"{machine.overlap:.0%} of their layer's compute, others are exposed."
        ),
        sections=(
            Section("Limits", (Paragraph(LIMITS),)),
            *_figure_sections(setup, scale),
            *table_sections(scale, machine),
            reproduce,
        ),
    )


def _figure_sections(setup: ScaleSetup, scale: Scale) -> list[Section]:
    tokens = setup.options.weak_tokens
    made = [
        _section(
            "weak", "Weak scaling", f"{tokens:,} tokens per rank; predicted.",
            lambda theme: draw_weak(scale.weak, theme),
        ),
        _section(
            "strong", "Strong scaling",
            "A constant global batch, with the fastest strategy at each number of ranks; dashed: "
            "linear scaling; predicted.",
            lambda theme: draw_strong(scale.strong, theme),
        ),
    ]  # fmt: skip
    if scale.grown:
        made.append(
            _section(
                "growth", "Model scaling",
                f"{GROWS_ON:,} ranks, {tokens:,} tokens per rank; predicted.",
                lambda theme: draw_growth(scale.grown, theme),
            )
        )  # fmt: skip
    made += [
        _section(
            "traffic", "Traffic",
            "Bytes that a rank sends in a step of one sequence per data parallel rank; counted.",
            lambda theme: draw_traffic(scale.counts, theme),
        ),
        _section(
            "padding", "Padding", "Values below 0.001 % are drawn at 0.001 %; planned.",
            lambda theme: draw_padding(scale.paddings, theme),
        ),
    ]  # fmt: skip
    if scale.initialisations or scale.dispatches:
        made.append(
            _section(
                "beginning", "Host time",
                "Initialisation until the first step, and the time that a strategy adds to a layer "
                "of LLaMA; measured.",
                lambda theme: draw_beginning(scale.initialisations, scale.dispatches, theme),
            )
        )  # fmt: skip
    return made


def _section(
    name: str, title: str, text: str, draw: Callable[[Theme], MatplotlibFigure]
) -> Section:
    return Section(title, (Paragraph(text), Figure(name, f"{title}. {text}", draw)))
