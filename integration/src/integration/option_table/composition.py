"""``python -m integration.option_table.composition``: writes docs/support/composition.md.

The page has every product of parallelism that the comparison trains, in each case of random
numbers; which products are trained in which mode and with which policies; and whether any two kinds
of parallelism are compared, run in a test, or are refused. It is made from the runs of the
comparison, of a test and of the option table, and from the largest differences in
docs/support/composition.json. The results of a comparison, even of a part of its runs, replace
what that has of the same runs, if they are an argument:
``python -m integration.option_table.composition integration-results/results.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from integration.compare.experiments.parallelism import EXPERIMENT, ParallelCase
from integration.compare.run import Run
from integration.compare.variants import LARGE, get_variant
from integration.errors import UsageError
from integration.models import model_shape
from integration.option_table.comparison_record import ComparisonRecord, Measurements
from integration.option_table.policies import POLICIES, TEST_FILE, cells_of
from integration.option_table.products import (
    NATIVE,
    compared_runs,
    mode_of,
    product_of,
    products,
)
from integration.option_table.trainer.choices import BASE, covering_runs, ranks_of, run_options
from integration.report.command_output import print_result
from integration.report.formatting import ABSENT, scientific
from integration.report.markdown import render_table
from integration.report.section import Column, Table
from integration.train.config import DIST_RNG_RANDOM, TrainConfig
from integration.train.validation import validate

_SUPPORT = Path("docs/support")

_INTRODUCTION = """# Composition

Which products of parallelism are trained and compared with one device, with weights that are drawn
on shards, with dropout, in Eager and in static mode; which policies of training each has; and which
two kinds of parallelism can be combined. [Options](options.md) has the same for all other options.

This page is written by `python -m integration.option_table.composition`, from the variants that
`nox -s integration` trains (`integration/src/integration/compare/variants.py`), the runs of
`integration/tests/test_option_table.py` and those of
`{test_file}`.
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

_POLICIES = """## Products, modes and policies

- **equal**: a run of the comparison has both, and one device's losses
- **tests**: `{test_file}` (nightly) trains both, with the
  losses of one device, of 8-bit Adam and Muon within 5e-5; in bf16 within 5e-3 of one device's in
  bf16, in fp16 within 5e-4; with recomputation the losses are those without it bit for bit; of
  checkpoints the product loads one device's, and one device the product's
- **runs**: a run of the option table has both, and every rank proves that they are in effect
- **no**: the trainer refuses both with the error of this number, before a process starts
- **untested**: the trainer accepts both, and no test has them

Products are of two ranks an axis, of LLaMA, and with EP of Mixtral. Sharded init is
`--init sharded`, dropout is `--dropout 0.1 --random dist-rng`, recomputation is
`--activation-checkpointing full`, accumulation is more than one microbatch a step outside of a
pipeline, clipping is `--clip-grad-norm`, compile is `--compile aot_eager`, offload is
`--offload --device sim`.
"""

_PRODUCTS = """## Losses

The largest difference of a loss from one device's: of LLaMA and Mixtral in nats per token, of the
DiT in squared error per pixel. "full": not in the default comparison, but in
`nox -s integration -- full`. {absent}: not supported, or not compared: context parallelism has no
dropout; pipelines of plans are compared with both sharded init and dropout, a pipeline of one
device's stages (`single`) with dropout; and systems without deferred init, and pipelines under
every schedule, with neither. A name is a value of `--systems` of the comparison, and of
`--parallelism.variants`. {large} needs 8 ranks and is trained if it is named;
`integration/tests/test_products.py` (nightly) trains more products, of three axes on 8 ranks, with
the elements of each parameter counted.

The last column is the commit of the measurement:
"""


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


def page(measured: ComparisonRecord) -> str:
    """Returns the page, as Markdown."""
    large = ", ".join(f"{product_of(variant)} (`{variant.name}`)" for variant in LARGE)
    measured = measured.restricted_to({run.job.name for run in compared_runs(EXPERIMENT.full)})
    return (
        "\n\n".join(
            [
                _INTRODUCTION.format(test_file=TEST_FILE).strip(),
                _PAIRS.format(absent=ABSENT).strip(),
                *_pairs(),
                _POLICIES.format(test_file=TEST_FILE).strip(),
                *_policies(),
                _PRODUCTS.format(absent=ABSENT, large=large).strip(),
                _commands(measured),
                *_products(measured),
            ]
        )
        + "\n"
    )


def _commands(measured: ComparisonRecord) -> str:
    """Returns the table of the comparisons that measured the losses."""
    rows = tuple(
        (part.commit, part.date, str(len(part.differences)), f"`{part.command}`",
         f"{part.cores} cores of an {part.cpu}, torch {part.torch}")
        for part in measured.parts
    )  # fmt: skip
    columns = map(Column, ("commit", "date", "runs", "command", "machine"))
    return render_table(Table(tuple(columns), rows))


def _policies() -> Iterator[str]:
    """Yields the table of products and policies, and the errors of those that are refused."""
    refusals: dict[str, int] = {}
    rows = []
    for product in products():
        cells = [
            cell
            if isinstance(cell, str)
            else f"no ({refusals.setdefault(str(cell), len(refusals) + 1)})"
            for cell in cells_of(product)
        ]
        rows.append((product.name, f"`{product.variant.system}`", *cells))
    names = ("product", "system", *(policy.name for policy in POLICIES))
    yield render_table(Table(tuple(map(Column, names)), tuple(rows)))
    texts = tuple((str(number), error) for error, number in refusals.items())
    yield render_table(Table((Column("number"), Column("error")), texts))


def _products(measured: ComparisonRecord) -> Iterator[str]:
    """Yields a heading and a table for each model."""
    quick = {run.job.name for run in compared_runs(EXPERIMENT.quick)}
    for model, of_model in groupby(compared_runs(EXPERIMENT.full), key=lambda run: run.job.model):
        of_variant: dict[str, list[Run]] = {}
        for run in of_model:
            of_variant.setdefault(run.job.system, []).append(run)
        rows = []
        for name, runs in of_variant.items():
            variant = get_variant(name)
            cases = {run.labels["case"]: run.job.name for run in runs}
            parts = [measured.part_of(job) for job in cases.values()]
            commits = dict.fromkeys(part.commit for part in parts if part is not None)
            cells = (_difference(cases.get(case), quick, measured) for case in ParallelCase)
            row = (product_of(variant), f"`{name}`", mode_of(variant), str(variant.ranks))
            rows.append((*row, *cells, ", ".join(commits)))
        columns = (
            *map(Column, ("product", "name", "system")),
            Column("ranks", is_number=True),
            *(Column(_heading(case), is_number=True) for case in ParallelCase),
            Column("measured"),
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


def _difference(name: str | None, quick: set[str], measured: ComparisonRecord) -> str:
    if name is None:
        return ABSENT
    part = measured.part_of(name)
    if part is not None:
        return scientific(part.differences[name])
    return "not measured yet" if name in quick else "full"


def _pairs() -> Iterator[str]:
    """Yields the table of two kinds together, and the errors of those that are refused."""
    compared = [vars(run.job.config) for run in compared_runs(EXPERIMENT.full)]
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
            run["system"] not in NATIVE and all(kind.is_in(run) for kind in two) for run in runs
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


def load() -> ComparisonRecord:
    """Returns the committed measurements."""
    return ComparisonRecord.of_json(json.loads((_SUPPORT / "composition.json").read_text()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page, after the measurements if a results.json is given; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m integration.option_table.composition",
        description="Writes docs/support/composition.md.",
    )
    parser.add_argument(
        "results", metavar="RESULTS", nargs="*", type=Path, help="results.json of comparisons"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parsed = parser.parse_args(arguments)
    known = {run.job.name for run in compared_runs(EXPERIMENT.full)}
    for path in parsed.results:
        measured = Measurements.of_results(json.loads(path.read_text()))
        record = load().updated(measured).restricted_to(known)
        text = json.dumps(record.as_json(), indent=1) + "\n"
        (_SUPPORT / "composition.json").write_text(text)
    record, path = load(), _SUPPORT / "composition.md"
    path.write_text(page(record))
    runs = sum(len(part.differences) for part in record.parts)
    sentence = f"written: {runs} compared runs of {len(products())} products: {path}"
    document = {"page": path, "runs": runs, "products": len(products())}
    print_result(sentence, document, as_json=parsed.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
