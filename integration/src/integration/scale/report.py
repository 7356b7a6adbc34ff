"""Writes the report of a simulation: report.md, report.html, scale.json and the figures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from integration.report.figures import save_png, svg_of
from integration.report.pages import Chart
from integration.report.palette import DARK, LIGHT, Theme
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
from integration.scale.tables import ReportTable, tables_of

__all__ = ["LIMITS", "write_report"]

LIMITS = (
    "Predicted, not measured, by a cost model with assumed constants. The model leaves out "
    "activation checkpointing, activation memory, the optimizer step, shared switches, slow ranks "
    "and host time. Compute has one efficiency for all shapes; all collectives use rings, at full "
    "bandwidth for every size; forward and backward of a layer hide their collectives together. "
    "FLOPs, including those of attention, and TP traffic are proportional to the tokens. Experts "
    "get equal numbers of tokens. The zoo has plans for LLaMA and Mixtral only; GPT-OSS and "
    "DeepSeek-V3 are simulated with fully_shard."
)


@dataclass(frozen=True)
class Section:
    """A figure with its heading."""

    title: str
    text: str
    chart: Chart


@dataclass(frozen=True)
class ScalePage:
    """The values of both templates."""

    title: str
    subject: str
    limits: str
    sections: tuple[Section, ...]
    tables: tuple[ReportTable, ...]
    command: str
    style: str


def write_report(setup: ScaleSetup, scale: Scale) -> Path:
    """Writes every file of the report into ``--out``, which exists.

    Returns:
        The path of report.html.
    """
    out, machine = setup.options.out, setup.machine
    (out / "figures").mkdir(exist_ok=True)
    found = {"machine": asdict(machine), **asdict(scale)}
    (out / "scale.json").write_text(json.dumps(found, indent=1) + "\n")
    page = ScalePage(
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
        limits=LIMITS,
        sections=tuple(_sections(setup, scale, out / "figures")),
        tables=tuple(tables_of(scale, machine)),
        command=shlex.join(["python", "-m", "integration.scale", *setup.options.command_line()]),
        style=_style(),
    )
    (out / "report.md").write_text(_render("report.md.j2", page, escape=False))
    html = out / "report.html"
    html.write_text(_render("report.html.j2", page, escape=True))
    return html


def _sections(setup: ScaleSetup, scale: Scale, folder: Path) -> list[Section]:
    tokens = setup.options.weak_tokens

    def section(name: str, title: str, text: str, draw: Callable[[Theme], Figure]) -> Section:
        light, dark = draw(LIGHT), draw(DARK)
        save_png(light, folder / f"{name}.png")
        return Section(title, text, Chart(name, f"{title}. {text}", svg_of(light), svg_of(dark)))

    made = [
        section(
            "weak", "Weak scaling", f"{tokens:,} tokens per rank; predicted.",
            lambda theme: draw_weak(scale.weak, theme),
        ),
        section(
            "strong", "Strong scaling",
            "A constant global batch, with the fastest strategy at each number of ranks; dashed: "
            "linear scaling; predicted.",
            lambda theme: draw_strong(scale.strong, theme),
        ),
    ]  # fmt: skip
    if scale.grown:
        made.append(
            section(
                "growth", "Model scaling",
                f"{GROWS_ON:,} ranks, {tokens:,} tokens per rank; predicted.",
                lambda theme: draw_growth(scale.grown, theme),
            )
        )  # fmt: skip
    made += [
        section(
            "traffic", "Traffic",
            "Bytes that a rank sends in a step of one sequence per data parallel rank; counted.",
            lambda theme: draw_traffic(scale.counts, theme),
        ),
        section(
            "padding", "Padding", "Values below 0.001 % are drawn at 0.001 %; planned.",
            lambda theme: draw_padding(scale.paddings, theme),
        ),
    ]  # fmt: skip
    if scale.initialisations or scale.dispatches:
        made.append(
            section(
                "beginning", "Host time",
                "Initialisation until the first step, and the time that a strategy adds to a layer "
                "of LLaMA; measured.",
                lambda theme: draw_beginning(scale.initialisations, scale.dispatches, theme),
            )
        )  # fmt: skip
    return made


def _style() -> str:
    """Returns the style sheet of the comparison's page."""
    page = files("integration.report").joinpath("report.html.j2").read_text()
    return page.partition("<style>")[2].partition("</style>")[0]


def _render(template: str, page: ScalePage, *, escape: bool) -> str:
    environment = jinja2.Environment(
        autoescape=escape, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    source = files(__package__).joinpath(template).read_text()
    return environment.from_string(source).render(page=page)
