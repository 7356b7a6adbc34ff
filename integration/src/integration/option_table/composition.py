"""``python -m integration.option_table.composition``: writes docs/support/composition.md.

The page has every product of parallelism that the comparison trains, in each case of random
numbers, and whether any two kinds of parallelism are compared, run in a test, or are refused. It is
made from the runs of the comparison, from the option table, and from the largest differences in
docs/support/composition.json, which the results of a comparison replace if they are an argument:
``python -m integration.option_table.composition integration-results/results.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from integration.compare.experiment import SharedOptions
from integration.compare.experiments.parallelism import EXPERIMENT, ParallelCase, ParallelOptions
from integration.compare.run import Run
from integration.compare.variants import LARGE, Variant, get_variant
from integration.errors import UsageError
from integration.models import model_shape
from integration.option_table.trainer.choices import BASE, covering_runs, ranks_of, run_options
from integration.report.formatting import ABSENT, scientific
from integration.report.markdown import render_table
from integration.report.section import Column, Table
from integration.train.config import DIST_RNG_RANDOM, TrainConfig
from integration.train.validation import validate

_SUPPORT = Path("docs/support")

# Peers, whose products say nothing about this repository's packages.
_NATIVE = ("fsdp1", "fsdp2", "dtensor-tp", "torchtitan-style")

_INTRODUCTION = """# Composition

Which products of parallelism are trained and compared with one device, with weights that are drawn
on shards, with dropout, in Eager and in static mode; and which two kinds of parallelism can be
combined. [Options](options.md) has the same for all other options.

This page is written by `python -m integration.option_table.composition`, from the variants that
`nox -s integration` trains (`integration/src/integration/compare/variants.py`) and the runs of
`integration/tests/test_option_table.py`. The differences are of one comparison:

- command: `{command}`, 6 steps a run
- machine: {cores} cores of an {cpu}, torch {torch}, gloo
- date and commit: {date}, {commit}
"""

_PAIRS = """## Two kinds together

- **equal**: a run of the comparison has both, and one device's losses
- **runs**: a run of the option table has both, and every rank proves that they are in effect
- **no**: `--system plan` refuses both with the error below, before a process starts
- **untested**: the trainer accepts both, and no test has them
- {absent}: alternatives of each other

Only runs of this repository's packages count, and of pipelines. DP with FSDP is HSDP; ZeRO-3
is that by phases of a plan, `--zero3`; loss is `--loss-parallel`.
"""

_PRODUCTS = """## Products

The largest difference of a loss from one device's: of LLaMA and Mixtral in nats per token, of the
DiT in squared error per pixel. "full": not in the default comparison, but in
`nox -s integration -- full`. {absent}: not supported, or not compared: context parallelism has no
dropout, and systems without deferred init, and pipelines, are compared with unsharded init and
without dropout. A name is a value of `--systems` of the comparison. {large} needs 8 ranks and is
trained if it is named; `integration/tests/test_products.py` (nightly) trains more products, of
three axes on 8 ranks, with the elements of each parameter counted.
"""


@dataclass(frozen=True)
class Measurements:
    """The largest differences of one comparison.

    Attributes:
        command: the command that measured them.
        date: when, as year, month and day.
        commit: the commit, abbreviated.
        torch: version of torch.
        cpu: name of the processor.
        cores: number of its cores.
        differences: largest absolute difference of a loss from one device's by name of the run.
    """

    command: str
    date: str
    commit: str
    torch: str
    cpu: str
    cores: int
    differences: Mapping[str, float]

    @classmethod
    def of_results(cls, results: Mapping[str, Any]) -> Measurements:
        """Returns those of a comparison's results.json, runs without a verdict left out."""
        facts = results["environment"]
        differences = {
            run["name"]: run["deviation"]["maximum"]
            for run in results["experiments"][EXPERIMENT.name]["runs"]
            if run["judged"] and run["deviation"] is not None
        }
        return cls(
            facts["command"],
            facts["date"].split()[0],
            facts["git_commit"][:7],
            facts["torch"],
            facts["cpu"],
            facts["cores"],
            differences,
        )


@dataclass(frozen=True)
class ParallelKind:
    """A kind of parallelism, or what is combined with all of them.

    Attributes:
        name: its name in the table.
        options: options of the trainer that request it, beside ``--system plan``.
        is_in: whether a run with these options has it.
    """

    name: str
    options: Mapping[str, Any]
    is_in: Callable[[Mapping[str, Any]], bool]


def _degree(name: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda options: options.get(name, 1) > 1


def _flag(name: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda options: bool(options.get(name))


KINDS: tuple[ParallelKind, ...] = (
    ParallelKind(
        "DP", {"dp_replicate": 2}, lambda o: o.get("dp_replicate", 1) > 1 or o["system"] == "ddp"
    ),
    ParallelKind(
        "FSDP",
        {"dp_shard": 2},
        lambda o: (o.get("dp_shard", 1) > 1 and not o.get("zero3")) or o["system"] == "fsdp",
    ),
    ParallelKind("ZeRO-3", {"dp_shard": 2, "zero3": True}, _flag("zero3")),
    ParallelKind("TP", {"tp": 2}, _degree("tp")),
    ParallelKind("SP", {"tp": 2, "sp": True}, _flag("sp")),
    ParallelKind("loss", {"tp": 2, "loss_parallel": True}, _flag("loss_parallel")),
    ParallelKind("CP", {"cp": 2}, _degree("cp")),
    ParallelKind("EP", {"dp_shard": 2, "ep": 2, "model": "mixtral-tiny"}, _degree("ep")),
    ParallelKind("PP", {"tp": 2, "pp_degree": 2}, _degree("pp_degree")),
    ParallelKind("static", {"static": True}, _flag("static")),
    ParallelKind("sharded init", {"init": "sharded"}, lambda o: o.get("init") == "sharded"),
    ParallelKind("dropout", {"dropout": 0.1, "random": DIST_RNG_RANDOM}, _flag("dropout")),
)


def page(measured: Measurements) -> str:
    """Returns the page, as Markdown."""
    facts = asdict(measured)
    large = ", ".join(f"{product_of(variant)} (`{variant.name}`)" for variant in LARGE)
    return (
        "\n\n".join(
            [
                _INTRODUCTION.format(**facts).strip(),
                _PAIRS.format(absent=ABSENT).strip(),
                *_pairs(),
                _PRODUCTS.format(absent=ABSENT, large=large).strip(),
                *_products(measured),
            ]
        )
        + "\n"
    )


def product_of(variant: Variant) -> str:
    """Returns the kinds of parallelism of a variant, such as "FSDP x TP x SP"."""
    degrees = variant.degrees
    systems = {"ddp": "DP", "fsdp": "FSDP", "fsdp1": "FSDP", "fsdp2": "FSDP", "dtensor-tp": "TP"}
    names = [systems[variant.system]] if variant.system in systems else []
    if degrees.dp_replicate > 1 and degrees.dp_shard > 1:
        names.append("HSDP")
    elif degrees.dp_shard > 1:
        names.append("ZeRO-3 by phases" if degrees.zero3 else "FSDP")
    elif degrees.dp_replicate > 1:
        names.append("DP")
    names += [f"CP ({degrees.cp_method})"] * (degrees.cp > 1) + ["TP"] * (degrees.tp > 1)
    names += ["SP"] * degrees.sp + ["loss parallel"] * degrees.loss_parallel
    names += ["EP"] * (degrees.ep > 1)
    return " x ".join([f"PP ({variant.schedule})"] * (variant.schedule is not None) + names)


def mode_of(variant: Variant) -> str:
    """Returns the trainer's system of a variant, and plan-api's mode."""
    mode = ", static" if variant.degrees.static else ", Eager"
    return f"`{variant.system}`{mode if variant.system == 'plan' else ''}"


def _runs(own: ParallelOptions) -> list[Run]:
    runs = EXPERIMENT.runs(EXPERIMENT.setting(SharedOptions(), own))
    return [run for run in runs if run.reference is not None and run.judged]


def _products(measured: Measurements) -> Iterator[str]:
    """Yields a heading and a table for each model."""
    quick = {run.job.name for run in _runs(EXPERIMENT.quick)}
    for model, of_model in groupby(_runs(EXPERIMENT.full), key=lambda run: run.job.model):
        rows = []
        for name, of_variant in groupby(of_model, key=lambda run: run.job.system):
            variant = get_variant(name)
            cases = {run.labels["case"]: run.job.name for run in of_variant}
            cells = (_difference(cases.get(case), quick, measured) for case in ParallelCase)
            row = (product_of(variant), f"`{name}`", mode_of(variant), str(variant.ranks), *cells)
            rows.append(row)
        headings = ("product", "name", "system")
        columns = (
            *map(Column, headings),
            Column("ranks", is_number=True),
            *(Column(_heading(case), is_number=True) for case in ParallelCase),
        )
        yield f"### {model}"
        yield (
            f"{len(rows)} variants, each within {scientific(model_shape(model).tolerance)} of one"
            " device."
        )
        yield render_table(Table(columns, tuple(rows)))


def _heading(case: ParallelCase) -> str:
    names = {ParallelCase.INIT: "sharded init", ParallelCase.BOTH: "sharded init and dropout"}
    return names.get(case, str(case))


def _difference(name: str | None, quick: set[str], measured: Measurements) -> str:
    if name is None:
        return ABSENT
    if name in measured.differences:
        return scientific(measured.differences[name])
    return "not measured yet" if name in quick else "full"


def _pairs() -> Iterator[str]:
    """Yields the table of two kinds together, and the errors of those that are refused."""
    compared = [vars(run.job.config) for run in _runs(EXPERIMENT.full)]
    trained = [run_options(run) for run in covering_runs()]
    found: dict[frozenset[str], str] = {}
    refusals: dict[str, list[str]] = {}
    for two in combinations(KINDS, 2):
        verdict = _together(two, compared, trained)
        if isinstance(verdict, UsageError):
            refusals.setdefault(str(verdict), []).append(" with ".join(kind.name for kind in two))
        found[frozenset(kind.name for kind in two)] = (
            "no" if isinstance(verdict, UsageError) else verdict
        )
    names = [kind.name for kind in KINDS]
    rows = [
        (first, *(found[frozenset((first, other))] if place < row else "" for place, other in
                  enumerate(names[:-1])))
        for row, first in enumerate(names)
        if row
    ]  # fmt: skip
    yield render_table(Table((Column(""), *map(Column, names[:-1])), tuple(rows)))
    yield "### What is refused"
    texts = tuple(("<br>".join(pairs), error) for error, pairs in refusals.items())
    yield render_table(Table((Column("kinds"), Column("error")), texts))


def _together(
    two: Sequence[ParallelKind],
    compared: Iterable[Mapping[str, Any]],
    trained: Iterable[Mapping[str, Any]],
) -> str | UsageError:
    def has_both(runs: Iterable[Mapping[str, Any]]) -> bool:
        return any(
            run["system"] not in _NATIVE and all(kind.is_in(run) for kind in two) for run in runs
        )

    options = {**BASE, "system": "plan", **two[0].options, **two[1].options}
    if not all(kind.is_in(options) for kind in two):
        return ABSENT
    if has_both(compared):
        return "equal"
    if has_both(trained):
        return "runs"
    try:
        ranks = ranks_of(options) * options.get("pp_degree", 1)
        validate(TrainConfig(**options, ranks=ranks))
    except UsageError as error:
        return error
    return "untested"


def load() -> Measurements:
    """Returns the committed measurements."""
    return Measurements(**json.loads((_SUPPORT / "composition.json").read_text()))


def main(arguments: Sequence[str]) -> None:
    """Writes the page, after the measurements if a results.json is given."""
    for path in arguments:
        measured = Measurements.of_results(json.loads(Path(path).read_text()))
        text = json.dumps(asdict(measured), indent=1) + "\n"
        (_SUPPORT / "composition.json").write_text(text)
    (_SUPPORT / "composition.md").write_text(page(load()))


if __name__ == "__main__":
    main(sys.argv[1:])
