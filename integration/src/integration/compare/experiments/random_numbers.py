"""Random numbers drawn on shards: each case on one device, and sharded on 2 and 4 ranks."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from matplotlib.figure import Figure as MatplotlibFigure

from integration.compare.curves import name_steps
from integration.compare.experiment import Experiment, Findings, Setting
from integration.compare.result import Result, Verdict
from integration.compare.rows import (
    FINAL_LOSS,
    MAXIMUM,
    STEP,
    SYSTEM,
    TOLERANCE,
    VERDICT,
    Field,
    largest_of,
    number,
    results_table,
    trained,
    verdict_row,
)
from integration.compare.run import Run
from integration.compare.variants import DROPOUT, REFERENCE, Source
from integration.errors import UsageError
from integration.models import model_shape
from integration.report.difference_axes import DifferenceLine, DifferencePanel, draw_differences
from integration.report.figures import new_figure, style_axes
from integration.report.formatting import ABSENT, listed, scientific
from integration.report.palette import MARKERS, Style, Theme, style_of
from integration.report.section import Cell, Column, Figure, Paragraph, Section, VerdictRow
from integration.systems import get_system

PARALLEL = "dtensor-tp"
RANKS = (2, 4)
# The order of reductions alone gives 1.4e-6 over 20 steps, with equal weights on 2 ranks.
TOLERANCE_OF_LOSSES = 1e-5


class RandomCase(StrEnum):
    """What a run draws on shards."""

    INIT = "init"
    DROPOUT = "dropout"


_TITLES = {RandomCase.INIT: "random init", RandomCase.DROPOUT: "dropout"}
_DRAWN = {RandomCase.INIT: "initial weights", RandomCase.DROPOUT: "dropout masks"}
_WEIGHTS = {"initial_weights": _DRAWN[RandomCase.INIT]}
_EQUAL = {
    RandomCase.INIT: _WEIGHTS,
    RandomCase.DROPOUT: _WEIGHTS | {"first_masks": _DRAWN[RandomCase.DROPOUT]},
}


@dataclass(frozen=True)
class RandomOptions:
    """The options of the comparison of random numbers."""

    model: str = "llama-tiny"
    """Model of the comparison of random numbers."""
    steps: int = 10
    """Optimizer steps of each run of that comparison."""


def _runs(setting: Setting[RandomOptions]) -> tuple[Run, ...]:
    setting.require_generator()
    shape = model_shape(setting.own.model)
    for ranks in RANKS:
        get_system(PARALLEL).check(ranks, shape)
    if importlib.util.find_spec("dist_rng") is None:
        raise UsageError(
            "the comparison of random numbers needs the package dist-rng, which is not installed;"
            " install it, or leave random_numbers out of --experiments"
        )
    return tuple(run for case in RandomCase for run in _of_case(setting, case))


def _of_case(setting: Setting[RandomOptions], case: RandomCase) -> Iterator[Run]:
    # The reference: one device, which draws with torch alone.
    yield _run(setting, case, REFERENCE, 1, Source.NATIVE)
    for ranks in RANKS:
        for source in Source:
            yield _run(setting, case, PARALLEL, ranks, source)


def _run(
    setting: Setting[RandomOptions], case: RandomCase, system: str, ranks: int, source: Source
) -> Run:
    choices = {
        "system": system,
        "ranks": ranks,
        "model": setting.own.model,
        "steps": setting.own.steps,
        "init": "sharded" if case is RandomCase.INIT else "whole",
        "dropout": DROPOUT if case is RandomCase.DROPOUT else 0.0,
        "random": source.option,
        "fingerprint": True,
    }
    on_shards = ranks > 1
    # Jobs with the same number of ranks and the same source share processes.
    job = setting.job(f"{case}-{system}-{ranks}-{source}", choices, session=f"{ranks}-{source}")
    return Run(
        job=job,
        title=f"{source} on {ranks} ranks with {_TITLES[case]}"
        if on_shards
        else f"the single device with {_TITLES[case]}",
        tolerance=TOLERANCE_OF_LOSSES,
        reference=f"{case}-{REFERENCE}-1-{Source.NATIVE}" if on_shards else None,
        judged=source is Source.DIST_RNG,
        equal=_EQUAL[case],
        labels={"case": case, "source": source},
    )


def _report(setting: Setting[RandomOptions], results: Sequence[Result]) -> Findings:
    figure = Figure(
        "random",
        "Difference from the single device by step, for random init and for dropout",
        lambda theme: draw_random(results, theme),
    )
    name = setting.own.model
    note = (
        "Equal means bit for bit, by SHA-256 of all weights before the first step and of the mask"
        " of every dropout in the first step, both gathered from the ranks. Native DTensor is shown"
        " for comparison, without a verdict."
    )
    contents = (
        Paragraph(_subject(setting, trained(results, name))),
        figure,
        results_table(results, *_COLUMNS),
        Paragraph(note, is_note=True),
    )
    verdicts = tuple(
        _verdict(name, case, [each for each in results if each.run.labels["case"] == case])
        for case in RandomCase
    )
    return Findings([Section("Random numbers", contents, verdicts)])


def _verdict(model: str, case: RandomCase, results: Sequence[Result]) -> VerdictRow:
    same = [each for each in results if each.verdict is Verdict.SAME]
    native = [each for each in results if each.verdict is Verdict.UNJUDGED]
    clauses = []
    if same:
        ranks = listed([str(each.run.job.ranks) for each in same])
        clauses.append(
            f"dist-rng on {ranks} ranks draws the {_DRAWN[case]} of the single device, bit for bit"
        )
    if native:
        found = largest_of(native).deviation
        assert found is not None
        clauses.append(
            f"losses with native DTensor differ by up to {scientific(found.maximum)}, shown without"
            " a verdict"
        )
    finding = f"{'; '.join(clauses)}." if clauses else ""
    return verdict_row(f"{model} with {_TITLES[case]} on shards", results, finding)


def _source(result: Result) -> Cell | str:
    source = result.run.labels["source"]
    return Cell(source, series=source) if result.run.reference else ABSENT


def _equal(result: Result, name: str) -> str:
    return {True: "equal", False: "differ", None: ABSENT}[result.equal.get(name)]


_COLUMNS = (
    Field(
        Column("case", terminal="on shards"),
        lambda each: _TITLES[RandomCase(each.run.labels["case"])],
    ),
    Field(Column("system"), SYSTEM.cell),
    number("ranks", lambda each: str(each.run.job.ranks), terminal="ranks"),
    Field(Column("random numbers", terminal="drawn by"), _source),
    VERDICT,
    Field(
        Column("initial weights", terminal="weights"), lambda each: _equal(each, "initial_weights")
    ),
    Field(Column("masks", terminal="masks"), lambda each: _equal(each, "first_masks")),
    MAXIMUM,
    STEP,
    TOLERANCE,
    number("final loss", FINAL_LOSS.cell),
)


def draw_random(results: Sequence[Result], theme: Theme) -> MatplotlibFigure:
    """Returns the figure: a panel per case, a colour per source, a marker per number of ranks."""
    figure = new_figure(theme, 4.6)
    cells = figure.subplots(1, len(RandomCase), sharey=True)
    panels = []
    for axes, case in zip(cells, RandomCase, strict=True):
        style_axes(axes, theme, f"{_TITLES[case].capitalize()} only", grid_axis="y")
        name_steps(axes)
        of_case = [each for each in results if each.run.labels["case"] == case]
        panels.append(DifferencePanel(axes, [_line(each, theme) for each in of_case if each.whole]))
    judged = {each.run.tolerance for each in results if each.run.judged}
    draw_differences(panels, judged, theme)
    cells[0].set_ylabel("|loss - loss of the single device|, nats per token")
    # Both panels show the same runs, unless one failed.
    fullest = max(panels, key=lambda panel: len(panel.lines))
    handles, labels = fullest.axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            *(handles, labels),
            loc="outside lower center",
            ncols=len(labels),
            frameon=False,
            labelcolor=theme.ink,
            fontsize=10,
        )
    return figure


def _line(result: Result, theme: Theme) -> DifferenceLine:
    assert result.whole is not None
    source, ranks = result.run.labels["source"], result.run.job.ranks
    marker = MARKERS[RANKS.index(ranks) % len(MARKERS)]
    style = Style(style_of(source, theme).colour, marker)
    name = "native DTensor" if source == Source.NATIVE else source
    return DifferenceLine(result.whole.differences, style, f"{name}, {ranks} ranks")


def _subject(setting: Setting[RandomOptions], model: str) -> str:
    ranks = listed([str(each) for each in RANKS])
    return (
        f"{model} was trained for {setting.own.steps} steps on the same text, on a single device"
        f" and by {PARALLEL} on {ranks} ranks, which draw random numbers on shards. With random"
        " init, each rank draws its shards of the weights. With dropout, ranks draw the masks of"
        f" attention (p = {DROPOUT}) and start from equal weights. Ranks take the microbatches of"
        " one device. Each case ran once with native DTensor and once with dist-rng. Where the"
        " numbers are equal, the remaining difference comes from the order of reductions."
    )


EXPERIMENT = Experiment(
    name="random_numbers",
    order=2,
    quick=RandomOptions(),
    full=RandomOptions(steps=60),
    runs=_runs,
    report=_report,
)
