"""Every system against one device: loss curves, step time, memory and collectives."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure

from integration.compare.curves import draw_losses, label
from integration.compare.experiment import Experiment, Findings, Setting
from integration.compare.measurements import WARM_UP_STEPS, Cost, LocalWork
from integration.compare.result import Result, by_model
from integration.compare.rows import (
    LOSS_COLUMNS,
    SYSTEM,
    Field,
    microbatches,
    number,
    results_table,
    trained,
    verdict_row,
)
from integration.compare.run import Run
from integration.compare.variants import (
    REFERENCE,
    SYSTEMS,
    VARIANT_NAMES,
    Variant,
    get_variant,
    names_in,
)
from integration.errors import UsageError
from integration.models import model_shape
from integration.report.figures import new_figure, style_axes
from integration.report.formatting import ABSENT, TIMES, listed, loss_unit, mebibytes
from integration.report.palette import Style, Theme, style_of
from integration.report.section import Column, Content, Figure, Paragraph, Section, VerdictRow

_BAR = 0.62
_MIB = 2**20
_WORK_NOTE = (
    f"Local microbatches: microbatches of a step on a rank {TIMES} samples of each. GFLOP: FLOPs"
    " of the matrix products and the attention that the first rank computed for one of them, on"
    f" average, in step {WARM_UP_STEPS}. Rows with equal samples and equal GFLOP, within 1 %, do"
    " the same work in a microbatch, and only these have a ratio: the step time per microbatch,"
    " relative to the first of them, which it names. One device computes as many microbatches as"
    " all data parallel ranks together; a ratio of 1 is a step without time for communication."
    " Ranks of tensor parallelism take the same samples and divide the work: they have"
    " more microbatches of the same size, and GFLOP count a rank's share of sharded operators and"
    " all of replicated ones; a dash means that no other row does the same work. With expert"
    " parallelism GFLOP depend on the routing. No row works around gloo: systems of torch gather"
    " DTensors with torch's functional all_gather, plans with that of dtensor-rules, which sends"
    " the same bytes."
)


@dataclass(frozen=True)
class RelativeTime:
    """The step time per microbatch, relative to that of a system with equal local work.

    Attributes:
        system: the other system.
        ratio: how many times its time per microbatch.
    """

    system: str
    ratio: float


@dataclass(frozen=True)
class SystemOptions:
    """The options of the comparison of systems."""

    systems: str = ",".join(variant.name for variant in SYSTEMS)
    """Systems to compare, separated by commas; 'single' always runs, and first."""
    models: str = "llama-10m,mixtral-10m,dit-3m"
    """Models to train, separated by commas; ``python -m integration.train --help`` lists them."""
    steps: int = 12
    """Optimizer steps per system and model."""
    warmup_steps: int = 4
    """Steps of linear learning-rate warm-up, at most half of all steps."""
    share_processes: bool = True
    """Run the models of a system in the same processes, which saves time; the peak memory of later
    models then includes what earlier ones left allocated."""

    def system_names(self) -> tuple[str, ...]:
        """Returns the names of the variants: the reference, then the others in the given order.

        Raises:
            UsageError: there is none besides the reference.
        """
        others = [name for name in names_in(self.systems) if name != REFERENCE]
        if not others:
            choices = ", ".join(name for name in VARIANT_NAMES if name != REFERENCE)
            raise UsageError(
                f"--systems: expected a system to compare with the single device, got"
                f" {self.systems!r}; add one or more of: {choices}"
            )
        return (REFERENCE, *others)

    def model_names(self) -> tuple[str, ...]:
        """Returns the names of the models that every system trains.

        Raises:
            UsageError: there is none.
        """
        names = names_in(self.models)
        if not names:
            raise UsageError(
                f"--models: expected the name of a model, got {self.models!r};"
                " python -m integration.train --help lists the models"
            )
        return names


def _runs(setting: Setting[SystemOptions]) -> tuple[Run, ...]:
    options = setting.own
    requested = [get_variant(name) for name in options.system_names()]
    pairs = _system_model_pairs(options, [each for each in requested if not each.make().missing])
    return tuple(_run(setting, variant, model) for variant, model in pairs)


def _system_model_pairs(
    options: SystemOptions, variants: Sequence[Variant]
) -> list[tuple[Variant, str]]:
    """Returns pairs of systems and models, grouped by system, as its models share processes."""
    models = {name: model_shape(name) for name in options.model_names()}
    pairs = [(each, name) for each in variants for name in models if each.takes(models[name])]
    for variant in variants:
        if variant not in (each for each, _ in pairs):
            raise UsageError(
                f"system {variant.name!r} supports none of --models {options.models}; leave it"
                " out, or add a model that it supports"
            )
    for name in models:
        if [each.name for each, model in pairs if model == name] == [REFERENCE]:
            raise UsageError(
                f"no system of --systems {options.systems} but the single device supports model"
                f" {name!r}; leave the model out, or add a system that supports it"
            )
    for variant, name in pairs:
        variant.make().check(variant.ranks, models[name])
    return pairs


def _run(setting: Setting[SystemOptions], variant: Variant, model: str) -> Run:
    options = setting.own
    choices = variant.choices | {
        "model": model,
        "steps": options.steps,
        "warmup_steps": min(options.warmup_steps, options.steps // 2),
    }
    if options.steps > WARM_UP_STEPS:  # the last step whose time is not measured
        choices["count_collectives"] = WARM_UP_STEPS
    session = variant.name if options.share_processes else None
    job = setting.job(f"{model}-{variant.name}", choices, system=variant.name, session=session)
    return Run(
        job=job,
        title=f"{variant.name} with {model}",
        tolerance=model_shape(model).tolerance,
        reference=None if variant.name == REFERENCE else f"{model}-{REFERENCE}",
    )


def _report(setting: Setting[SystemOptions], results: Sequence[Result]) -> Findings:
    groups = by_model(results)
    curves: list[Content] = [Paragraph(_subject(setting, groups))]
    speed: list[Content] = []
    for model, same in groups.items():
        curves += _curves(model, same)
        speed += _speed(model, same)
    speed += [
        Paragraph(_WORK_NOTE, is_note=True),
        Paragraph(_cost_note(setting, results), is_note=True),
    ]
    missing = [
        VerdictRow(name, None, finding=f"{name} is {why}.")
        for name in setting.own.system_names()
        if (why := get_variant(name).make().missing)
    ]
    verdicts = [
        verdict_row(f"{model} under {len(same) - 1} system{'s' * (len(same) > 2)}", same)
        for model, same in groups.items()
    ]
    return Findings(
        (
            Section("Curves", tuple(curves), (*verdicts, *missing)),
            Section("Speed, memory and collectives", tuple(speed)),
        ),
        {
            "relative_times": {
                model: {system: asdict(each) for system, each in relative_times(same).items()}
                for model, same in groups.items()
            }
        },
    )


def _curves(model: str, results: Sequence[Result]) -> list[Content]:
    """Returns the figure and the table of one model's losses."""
    degree = number(
        "data-parallel",
        lambda result: str(result.summary.data_parallel_degree) if result.summary else ABSENT,
    )
    unit = loss_unit(model)
    return [
        results_table(results, SYSTEM, *LOSS_COLUMNS, degree, title=model),
        Figure(
            f"losses-{model}",
            f"Loss of {model} by step under every system, and its difference from one device",
            lambda theme: draw_losses([results], [""], theme),
        ),
        Paragraph(
            f"Δ: the loss of a step minus the loss of the single device, in {unit}.", is_note=True
        ),
    ]


def _speed(model: str, results: Sequence[Result]) -> list[Content]:
    """Returns the figure and the table of one model's local work and cost."""
    return [
        results_table(
            results,
            *(SYSTEM, *_TIME, _relative_column(results), *_RESOURCES),
            title=f"{model}: speed",
        ),
        Figure(
            f"cost-{model}",
            f"Step time, memory and collectives of {model} under every system",
            lambda theme: draw_cost(results, theme),
        ),
    ]


def _gigaflops(result: Result) -> str:
    work = result.work
    return ABSENT if work is None or work.flops is None else f"{work.flops / 1e9:.3g}"


def relative_times(results: Sequence[Result]) -> dict[str, RelativeTime]:
    """Returns the relative times of one model's runs by system, where another does equal work."""
    seconds: dict[str, float] = {}
    work: dict[str, LocalWork] = {}
    for each in results:
        if each.cost is not None and each.work is not None:
            seconds[each.system] = each.cost.step_seconds / each.work.microbatches
            work[each.system] = each.work
    found = {}
    for system, own in work.items():
        first, *others = (name for name in work if name == system or own.equals(work[name]))
        if others:
            found[system] = RelativeTime(first, seconds[system] / seconds[first])
    return found


def _relative_column(results: Sequence[Result]) -> Field:
    found = relative_times(results)

    def cell(result: Result) -> str:
        relative = found.get(result.system)
        return f"{relative.ratio:.2f}{TIMES} {relative.system}" if relative else ABSENT

    return number("per microbatch, relative to equal work", cell, terminal="ratio")


def _calls(result: Result) -> str:
    counts = result.summary.collectives if result.summary else None
    return ABSENT if counts is None else str(sum(each.calls for each in counts))


def _collectives(result: Result) -> str:
    counts = result.summary.collectives if result.summary else None
    if counts is None:
        return ABSENT
    kinds = (f"{each.calls} {each.kind}, {mebibytes(each.bytes)}" for each in counts)
    return "; ".join(kinds) or "none"


def _mebibytes(count: float) -> str:
    return f"{count / _MIB:,.0f} MiB"


_TIME = (
    number("local microbatches", lambda each: microbatches(each.work), terminal="micro-\nbatches"),
    number("GFLOP of each", _gigaflops, terminal="GFLOP"),
    number(
        "step time",
        lambda each: f"{each.cost.step_seconds * 1e3:,.0f} ms" if each.cost else ABSENT,
        terminal="step",
    ),
)
_RESOURCES = (
    number("tokens/s", lambda each: f"{each.cost.tokens_per_second:,.0f}" if each.cost else ABSENT),
    number(
        "peak memory, mean of ranks",
        lambda each: _mebibytes(each.cost.peak_rss_mean) if each.cost else ABSENT,
        terminal="memory",
    ),
    number(
        "largest rank", lambda each: _mebibytes(each.cost.peak_rss_max) if each.cost else ABSENT
    ),
    number("calls", _calls, terminal="calls"),
    Field(Column("collectives of a step"), _collectives),
)


def draw_cost(results: Sequence[Result], theme: Theme) -> MatplotlibFigure:
    """Returns the bars of one model; systems that failed have a label instead of a bar."""
    figure = new_figure(theme, 1.2 + 0.5 * len(results))
    times, memory, collectives = figure.subplots(1, 3, sharey=True)
    style_axes(times, theme, "Median step time, ms", grid_axis="x")
    style_axes(memory, theme, "Peak memory per rank, MiB", grid_axis="x")
    style_axes(collectives, theme, "Collectives of a step, MiB", grid_axis="x")
    # Beside the bars are ratios to the first row alone: bars do not name another.
    first = results[0].system
    relative = {
        system: each for system, each in relative_times(results).items() if each.system == first
    }
    for place, result in enumerate(results):
        if result.cost is None:
            for axes in (times, memory, collectives):
                axes.text(0, place, " failed", va="center", color=theme.muted, fontsize=9.5)
            continue
        style = style_of(result.system, theme)
        _draw_time(times, place, relative.get(result.system), result.cost, style, theme)
        _draw_memory(memory, place, result.cost, style, theme)
        _draw_collectives(collectives, place, result, style, theme)
    times.set_yticks(range(len(results)), [label(result) for result in results])
    times.tick_params(axis="y", labelcolor=theme.ink, labelsize=10.5)
    times.invert_yaxis()
    for axes in (times, memory, collectives):
        # Space for the numbers to the right of the bars.
        axes.set_xlim(0, max(axes.dataLim.x1, 1e-9) * 1.5)
    return figure


def _draw_time(
    axes: Axes, place: int, relative: RelativeTime | None, cost: Cost, style: Style, theme: Theme
) -> None:
    median = cost.step_seconds * 1e3
    low, high = (seconds * 1e3 for seconds in cost.quartiles)
    axes.barh(place, median, height=_BAR, color=style.colour)
    axes.errorbar(
        median, place, xerr=[[median - low], [high - median]], color=theme.ink, capsize=3, lw=1.1
    )
    ratio = f"   {relative.ratio:.2f}{TIMES}" if relative else ""
    _write(axes, max(median, high), place, f"{median:,.0f}{ratio}", theme)


def _draw_memory(axes: Axes, place: int, cost: Cost, style: Style, theme: Theme) -> None:
    mean, largest = cost.peak_rss_mean / _MIB, cost.peak_rss_max / _MIB
    axes.barh(place, mean, height=_BAR, color=style.colour)
    axes.plot([largest, largest], [place - 0.2, place + 0.2], color=theme.ink, linewidth=1.6)
    _write(axes, max(mean, largest), place, f"{mean:,.0f}", theme)


def _draw_collectives(axes: Axes, place: int, result: Result, style: Style, theme: Theme) -> None:
    counts = result.summary.collectives if result.summary else None
    if counts is None:
        return
    total = sum(each.bytes for each in counts) / _MIB
    calls = sum(each.calls for each in counts)
    axes.barh(place, total, height=_BAR, color=style.colour)
    _write(axes, total, place, f"{total:,.0f} in {calls}" if calls else "none", theme)


def _write(axes: Axes, end: float, place: int, text: str, theme: Theme) -> None:
    axes.annotate(
        text,
        (end, place),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        color=theme.ink,
        fontsize=10,
    )


def _subject(setting: Setting[SystemOptions], groups: dict[str, list[Result]]) -> str:
    models = [trained(same, model) for model, same in groups.items()]
    systems = dict.fromkeys(each.system for same in groups.values() for each in same)
    others = listed([system for system in systems if system != REFERENCE])
    which = f"{listed(models)} {'was' if len(models) == 1 else 'were'}"
    summaries = (each.summary for same in groups.values() for each in same)
    sources = dict.fromkeys(each.data_source for each in summaries if each)
    data = f" on {listed(list(sources))}" if sources else ""
    return (
        f"{which} trained in fp32, without changes to the model,{data} for {setting.own.steps}"
        f" steps: on a single device and under {others}, as far as they support the model. Every"
        " run of a model started from the same weights and had the same"
        f" {setting.shared.global_batch} samples in every step, so that any difference between"
        " curves comes from the system."
    )


def _cost_note(setting: Setting[SystemOptions], results: Sequence[Result]) -> str:
    ranks = max(each.run.job.ranks for each in results)
    shared = ""
    if setting.own.share_processes:
        shared = (
            " The models of a system were trained one after another in the same processes: the"
            " memory of later models includes what earlier ones left allocated."
        )
    threads, cores = setting.shared.threads, os.cpu_count() or 1
    per_rank = "one thread" if threads == 1 else f"{threads} threads"
    sharing = f"so that {ranks} ranks have {ranks} times the threads of the single device"
    if ranks * threads > cores:
        sharing = f"but there are only {cores} cores, so that step times are not meaningful"
    return (
        f"Step time is the median wall time on the first rank without the first {WARM_UP_STEPS}"
        " steps; whiskers span the first to the third quartile. Memory is the peak resident set of"
        f" a rank, Python and torch included; the tick marks the largest rank.{shared}"
        f" Collectives are those that the first rank issued in step {WARM_UP_STEPS}, with the"
        " bytes of the full tensors that they gathered, reduced, scattered or sent: an all_reduce"
        " sends about twice the bytes of a reduce_scatter of the same tensor, and a transfer"
        " between two ranks is counted once, by its sender. All ranks run on this machine and"
        f" communicate over gloo; each has {per_rank}, {sharing}. Other processes on the machine"
        " affect these times."
    )


EXPERIMENT = Experiment(
    name="systems",
    order=1,
    quick=SystemOptions(),
    full=SystemOptions(steps=120, warmup_steps=20, share_processes=False),
    runs=_runs,
    report=_report,
    prefix="",
)
