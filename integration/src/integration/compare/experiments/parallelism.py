"""Every kind of parallelism, and their products, against one device, on small models.

Each variant trains with weights drawn on the ranks' shards, with dropout, and with both (the two
cases of veScale, section 8, separately and together), and is compared with one device.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.lines import Line2D

from integration.compare.curves import name_steps
from integration.compare.experiment import Experiment, Findings, Setting
from integration.compare.result import Result, by_model
from integration.compare.rows import largest_of, microbatches, verdict_cell, verdict_row
from integration.compare.run import Run
from integration.compare.variants import (
    DROPOUT,
    NATIVE,
    PIPELINES,
    PLAIN,
    PRODUCTS,
    REFERENCE,
    Source,
    Variant,
    get_variant,
    names_in,
)
from integration.errors import UsageError
from integration.models import model_shape
from integration.report.difference_axes import draw_tolerance
from integration.report.figures import new_figure, style_axes
from integration.report.formatting import ABSENT, TIMES, listed, loss_unit, scientific
from integration.report.palette import MARKERS, Theme, style_of
from integration.report.section import Cell, Column, Figure, Paragraph, Section, Table

# Where differences of zero are drawn.
FLOOR = 1e-9
# Microbatches of a pipeline that draws one device's masks: the fewest that two stages can run.
_PP_MICROBATCHES = 2


class ParallelCase(StrEnum):
    """What a run draws at random."""

    INIT = "init"
    DROPOUT = "dropout"
    BOTH = "both"
    NEITHER = "neither"

    @property
    def heading(self) -> str:
        """Its title in tables and figures."""
        return "random init" if self is ParallelCase.INIT else str(self)

    @property
    def draws_weights(self) -> bool:
        """Whether ranks draw the weights on their shards."""
        return self in (ParallelCase.INIT, ParallelCase.BOTH)

    @property
    def drops_out(self) -> bool:
        """Whether the run has dropout."""
        return self in (ParallelCase.DROPOUT, ParallelCase.BOTH)


_RANDOM = (ParallelCase.INIT, ParallelCase.DROPOUT, ParallelCase.BOTH)


@dataclass(frozen=True)
class ParallelOptions:
    """The options of the comparison of parallelism."""

    models: str = "llama-tiny,mixtral-tiny,dit-tiny"
    """Models of the comparison of parallelism, separated by commas."""
    steps: int = 6
    """Optimizer steps of each run of that comparison."""
    every_case: bool = False
    """Compare every pipeline of plans, and on more than 2 ranks random weights and dropout
    separately too; by default a few pipelines, and both together only."""
    variants: str | None = None
    """Variants to compare, by name, separated by commas; by default all."""


def _runs(setting: Setting[ParallelOptions]) -> tuple[Run, ...]:
    setting.require_generator()
    models = names_in(setting.own.models)
    for model in models:
        model_shape(model)
    parts = (_native, _products)
    compared = [run for part in parts for model in models for run in part(setting, model)]
    missing = _names(setting) - {run.job.system for run in compared}
    if missing:
        raise UsageError(
            f"{setting.option('variants')}: expected variants of parallelism of"
            f" {setting.own.models}, got {', '.join(sorted(missing))}; leave these out, or give"
            f" other {setting.option('models')}"
        )
    used = {run.reference for run in compared}
    every = (run for model in models for run in _references(setting, model))
    return (*(run for run in every if run.job.name in used), *compared)


def _names(setting: Setting[ParallelOptions]) -> set[str]:
    """Returns the names of the variants to compare; empty: all."""
    return {get_variant(name).name for name in names_in(setting.own.variants or "")}


def _selected(
    setting: Setting[ParallelOptions], model: str, variants: Sequence[Variant]
) -> Iterator[Variant]:
    """Yields those of ``variants`` that are compared on a model."""
    names, shape = _names(setting), model_shape(model)
    for variant in variants:
        by_default = setting.own.every_case or not variant.in_full
        if variant.takes(shape) and (variant.name in names if names else by_default):
            yield variant


def _references(setting: Setting[ParallelOptions], model: str) -> Iterator[Run]:
    for case in ParallelCase:
        yield _run(setting, model, case, get_variant(REFERENCE), "whole")
        if case.draws_weights and model_shape(model).can_reinitialize:
            # Native systems draw with the model's initialiser, in its order.
            yield _run(setting, model, case, get_variant(REFERENCE), "sharded")


def _native(setting: Setting[ParallelOptions], model: str) -> Iterator[Run]:
    shape = model_shape(model)
    for variant in _selected(setting, model, NATIVE):
        for case in _RANDOM:
            if case.draws_weights and not shape.can_reinitialize:
                continue
            init = "sharded" if case.draws_weights else "whole"
            reference = f"{model}-{case}-{REFERENCE}" + "-redrawn" * case.draws_weights
            yield _run(setting, model, case, variant, init, reference)


def _products(setting: Setting[ParallelOptions], model: str) -> Iterator[Run]:
    for variant in _selected(setting, model, (*PRODUCTS, *PIPELINES)):
        for case in _cases(variant, every_case=setting.own.every_case):
            init = "sharded" if case.draws_weights else "whole"
            reference = f"{model}-{case}-{REFERENCE}"
            yield _run(setting, model, case, variant, init, reference, Source.DIST_RNG)
    reference = f"{model}-{ParallelCase.NEITHER}-{REFERENCE}"
    for variant in _selected(setting, model, PLAIN):
        yield _run(
            setting, model, ParallelCase.NEITHER, variant, "whole", reference, Source.DIST_RNG
        )


def _cases(variant: Variant, *, every_case: bool) -> tuple[ParallelCase, ...]:
    if not variant.drops_out:
        return (ParallelCase.INIT,)
    if not variant.draws_on_shards:
        return (ParallelCase.DROPOUT,)
    separately = variant.schedule is None and (every_case or variant.ranks <= 2)
    return _RANDOM if separately else (ParallelCase.BOTH,)


def _run(
    setting: Setting[ParallelOptions],
    model: str,
    case: ParallelCase,
    variant: Variant,
    init: str,
    reference: str | None = None,
    source: Source = Source.NATIVE,
) -> Run:
    redrawn = reference is None and init == "sharded"
    choices = variant.choices | {
        "model": model,
        "steps": setting.own.steps,
        **batches(setting, variant, case),
        "init": init,
        "dropout": DROPOUT if case.drops_out else 0.0,
        # A run without random numbers needs no source.
        "random": (Source.NATIVE if case is ParallelCase.NEITHER else source).option,
    }
    # Jobs with the same number of ranks and the same source share processes; native systems share
    # processes in which no package of this repository is loaded.
    native = case is ParallelCase.NEITHER and variant.make().native
    job = setting.job(
        f"{model}-{case}-{variant.name}" + "-redrawn" * redrawn,
        choices,
        system=variant.name,
        session=f"{variant.ranks}-{Source.NATIVE if native else source}",
    )
    return Run(
        job=job,
        title=f"{model} by {variant.name} ({case.heading})",
        tolerance=model_shape(model).tolerance,
        reference=reference,
        judged=source is Source.DIST_RNG,
        labels={"case": case, "source": source},
    )


def batches(
    setting: Setting[ParallelOptions], variant: Variant, case: ParallelCase
) -> dict[str, int]:
    """Returns the samples of a rank's microbatch, and into how many parts a pipeline splits them.

    Under a plan the microbatches of all data parallel ranks together, or such a part of them, have
    the size of one device's microbatch, so that dropout draws the same masks.

    Raises:
        UsageError: the global batch has too few of one device's microbatches for a pipeline.
    """
    samples = setting.shared.micro_batch
    degree = variant.data_parallel_degree if variant.make().shards_batches else 1
    if variant.schedule is None or case is ParallelCase.NEITHER:
        return {"micro_batch": max(1, samples // degree)}
    least = _PP_MICROBATCHES * max(samples, degree)
    if setting.shared.global_batch < least:
        raise UsageError(
            f"--global-batch: expected at least {least}, as pipelines run {_PP_MICROBATCHES}"
            f" microbatches of --micro-batch {samples} at once, got {setting.shared.global_batch};"
            f" give more, or name other {setting.option('variants')} than {variant.name}"
        )
    return {"micro_batch": least // degree, "pp_microbatches": _PP_MICROBATCHES}


def _report(setting: Setting[ParallelOptions], results: Sequence[Result]) -> Findings:
    shown = shown_results(results)
    contents = (
        Paragraph(_subject(results)),
        Figure(
            "parallelism",
            "Largest difference from one device of every variant, a column per model",
            lambda theme: draw_parallelism(shown, theme),
        ),
        Figure(
            "cases",
            "Difference from one device by step of every variant, in the three cases of random"
            " numbers",
            lambda theme: draw_cases(shown, theme),
        ),
        _table(shown),
        Paragraph(_NOTE, is_note=True),
    )
    verdicts = tuple(
        verdict_row(f"{model} by {_count(same)} variants", same, _largest(same))
        for model, same in by_model(results).items()
    )
    return Findings([Section("Parallelism", contents, verdicts)])


def shown_results(results: Sequence[Result]) -> list[Result]:
    """Returns the results with something to show: those with a reference, and failed references."""
    return [each for each in results if each.run.reference or each.failure]


def _count(results: Sequence[Result]) -> int:
    return len({each.system for each in results if each.run.reference})


def _largest(results: Sequence[Result]) -> str:
    passed = [each for each in results if each.run.judged and each.deviation]
    passed = [each for each in passed if each.verdict.passes]
    return f"{len(passed)} runs have one device's losses." if passed else ""


def _table(results: Sequence[Result]) -> Table:
    """Returns a row per model and variant, grouped by model, with two cells for each case."""
    columns = [
        Column("model", terminal="model"),
        Column("trained by", terminal="trained by"),
        Column("ranks", is_number=True, terminal="ranks"),
        Column("local microbatches", is_number=True, terminal="micro-\nbatches"),
        Column("tolerance", is_number=True),
    ]
    for case in ParallelCase:
        columns.append(Column(f"{case.heading}: max |Δ|", is_number=True, terminal=case.heading))
        columns.append(Column("mean", is_number=True))
    columns.append(Column("passes"))
    rows = []
    for model, same in by_model(results).items():
        variants = list(dict.fromkeys((each.system, each.run.judged) for each in same))
        ordered = sorted(same, key=lambda each: variants.index((each.system, each.run.judged)))
        for _, group in groupby(ordered, key=lambda each: (each.system, each.run.judged)):
            rows.append(_row(model, list(group)))
    return Table(tuple(columns), tuple(rows))


def _row(model: str, results: Sequence[Result]) -> tuple[Cell | str, ...]:
    first = results[0].run
    by_case = {each.run.labels["case"]: each for each in results}
    passes = all(each.verdict.passes for each in results)
    work = next((each.work for each in results if each.work), None)
    cells = [cell for case in ParallelCase for cell in _cells(by_case.get(case))]
    verdict: Cell | str = Cell("yes" if passes else "no", passes=passes)
    return (
        model,
        _label(results[0]),
        str(first.job.ranks),
        microbatches(work),
        scientific(first.tolerance),
        *cells,
        verdict if first.judged or not passes else "",
    )


def _cells(result: Result | None) -> tuple[Cell | str, Cell | str]:
    if result is None:
        return ABSENT, ABSENT
    if result.deviation is None:
        return verdict_cell(result), ABSENT
    found = result.deviation
    failed = None if result.verdict.passes else False
    return Cell(scientific(found.maximum), passes=failed), scientific(found.mean)


def _label(result: Result) -> str:
    is_native = result.run.reference is not None and not result.run.judged
    return f"{result.system} (native)" if is_native else result.system


def draw_parallelism(results: Sequence[Result], theme: Theme) -> MatplotlibFigure:
    """Returns the largest difference of every variant: a column per model, a dot per case."""
    groups = by_model(results)
    labels = list(dict.fromkeys(_label(each) for each in results))
    figure = new_figure(theme, 1.6 + 0.24 * len(labels))
    cells = figure.subplots(1, len(groups), sharey=True, sharex=True, squeeze=False)[0]
    for axes, (model, same) in zip(cells, groups.items(), strict=True):
        style_axes(axes, theme, f"{model}: largest |Δ|", grid_axis="x")
        for case, marker in zip(ParallelCase, MARKERS, strict=False):
            _draw_case(axes, same, case, labels, marker, theme)
        axes.set_xscale("log")
        for tolerance in {each.run.tolerance for each in same}:
            axes.axvline(tolerance, color=theme.ink, linewidth=1.1, linestyle=(0, (5, 3)))
            axes.set_xlabel(f"dashed: tolerance {scientific(tolerance)}", color=theme.muted)
    cells[0].set_yticks(range(len(labels)), labels)
    cells[0].tick_params(axis="y", labelcolor=theme.ink, labelsize=9)
    cells[0].invert_yaxis()
    cells[0].legend(loc="lower right", fontsize=8, labelcolor=theme.ink, frameon=False)
    return figure


def _draw_case(
    axes: Axes,
    results: Sequence[Result],
    case: ParallelCase,
    labels: list[str],
    marker: str,
    theme: Theme,
) -> None:
    places, values, colours = [], [], []
    for result in results:
        found = result.deviation
        if result.run.labels["case"] == case and found and math.isfinite(found.maximum):
            places.append(labels.index(_label(result)))
            values.append(max(found.maximum, FLOOR))
            colours.append(_colour(result, theme))
    axes.scatter(values, places, c=colours, marker=marker, s=22, label=case.heading)


def _colour(result: Result, theme: Theme) -> str:
    return style_of(result.run.labels["source"], theme).colour


def draw_cases(results: Sequence[Result], theme: Theme) -> MatplotlibFigure:
    """Returns the differences by step: a row per model, a column per case, a line per variant."""
    groups = by_model(results)
    figure = new_figure(theme, 0.8 + 2.4 * len(groups))
    grid = figure.subplots(len(groups), len(_RANDOM), sharex=True, sharey=True, squeeze=False)
    for cells, (model, same) in zip(grid, groups.items(), strict=True):
        cells[0].set_ylabel(f"|Δ|, {loss_unit(model)}")
        for axes, case in zip(cells, _RANDOM, strict=True):
            style_axes(axes, theme, f"{model}: {case.heading}", grid_axis="y")
            _draw_panel(axes, [each for each in same if each.run.labels["case"] == case], theme)
    for axes in grid[-1]:
        axes.set_xlabel("optimizer step")
    names = {
        Source.DIST_RNG: "with all packages, a line per variant",
        Source.NATIVE: "native DTensor",
    }
    figure.legend(
        handles=[
            Line2D([], [], color=style_of(source, theme).colour, label=name)
            for source, name in names.items()
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        labelcolor=theme.ink,
        fontsize=10,
    )
    return figure


def _draw_panel(axes: Axes, results: Sequence[Result], theme: Theme) -> None:
    axes.set_yscale("log")
    axes.minorticks_off()
    name_steps(axes)
    axes.set_xlabel("")
    for result in results:
        if result.deviation is None:
            continue
        found = result.deviation.differences
        axes.plot(
            range(1, len(found) + 1),
            [max(value, FLOOR) if math.isfinite(value) else math.nan for value in found],
            color=_colour(result, theme),
            linewidth=0.8,
            marker="o",
            markersize=2.5,
            alpha=0.4 if result.run.judged else 0.9,
        )
    for tolerance in {each.run.tolerance for each in results}:
        draw_tolerance(axes, tolerance, theme, below=True)
    if not results:
        axes.text(*(0.5, 0.5, "no runs"), transform=axes.transAxes, ha="center", color=theme.muted)
    ticks = [FLOOR, *(10.0**decade for decade in range(-8, 0, 2))]
    axes.set_yticks(ticks, ["0", *(f"$10^{{{decade}}}$" for decade in range(-8, 0, 2))])


def _subject(results: Sequence[Result]) -> str:
    native = [each for each in results if not each.run.judged and each.deviation]
    clause = ""
    if native:
        found = largest_of(native).deviation
        assert found is not None
        clause = (
            " Runs with the random numbers of native DTensor, which differ by up to"
            f" {scientific(found.maximum)}, are shown without a verdict."
        )
    return (
        f"{listed(list(by_model(results)))} were trained with every kind of parallelism that"
        " plan-api supports, and their products: with weights that ranks draw on their shards, with"
        " dropout, and with both. Systems that draw nothing on shards, and pipelines of them, were"
        f" trained with neither. Each run is compared with one device.{clause}"
    )


_NOTE = (
    "Each case has the largest and the mean difference of the loss from one device's, in nats per"
    " token, for a DiT in squared error per pixel. Local microbatches: number of microbatches of a"
    f" step on a rank {TIMES} samples of each. Under a plan the microbatches of all data parallel"
    " ranks together have the size of one device's, so that dropout masks are comparable; with"
    f" dropout pipelines run {_PP_MICROBATCHES} of them at once. Step times are not compared here."
)

EXPERIMENT = Experiment(
    name="parallelism",
    order=4,
    quick=ParallelOptions(),
    full=ParallelOptions(steps=20, every_case=True),
    runs=_runs,
    report=_report,
)
