"""``python -m integration.option_table [PAGE]``: writes docs/support/options.md from the table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from integration.option_table.fully_shard import choices as sharding
from integration.option_table.pairwise import Choice, Pair
from integration.option_table.plan import choices as planning
from integration.option_table.trainer import choices as training
from integration.report.command_output import ProgressBar, print_result
from integration.report.markdown import render_table
from integration.report.section import Column, Table

_INTRODUCTION = """# Options

Of every option that changes how a step is executed: the observation that proves that it is in
effect. Any two options of a table are in effect together, or refused with a sentence before
anything is sent. This page is written by `python -m integration.option_table`, from the data of the
tests.

## The trainer

Every option of `python -m integration.train` that changes how a step is executed, with the
observation that proves that it is in effect; but for `--placements`, of which
`integration/tests/test_placements.py` has the tests, and `--offload`, which needs an accelerator:
`integration/tests/test_device.py`. What is refused is so before a process starts, with exit code 2.

`integration/tests/test_option_table.py` observes all accepted pairs in {runs} runs of `llama-tiny`
and `mixtral-tiny`, {short} on 2 ranks and {long} on 4, in `nox -s nightly`; and with the
other tests the options of these packages' systems that a few of those on 2 ranks have.
"""

_FULLY_SHARD = """
## fully_shard

Options of `fsdp.fully_shard` and of the methods of the modules that it has sharded. `dp_mesh_dims`
and `grad_placements_fn` are not in this table; they have tests of their own
(`packages/fsdp/tests`). Of `placements`, "zero3" and "hsdp" are what there is without them.
`integration/tests/test_option_table_fully_shard.py` observes all accepted pairs in {runs} runs of a
small model, {short} on 2 ranks and {long} on 4, in `nox -s nightly`, and each option once in a few
of those on 2 ranks; with the other tests those of fsdp run. In each of these runs gradients are
compared with one device's. What is refused is a `ValueError`.
"""

_PLAN = """
## Plan and parallelize

Every kind of entry of `plan_api.Plan` and its options, and every option of `plan_api.parallelize`.
`integration/tests/test_option_table_plan.py` observes all accepted pairs in {runs} runs of a small
model, {short} on 2 ranks and {long} on 4, in `nox -s nightly`; with the other tests those of
plan-api run. In each of these runs gradients and weights are compared with one device's. What is
refused is a `ValueError`, of which the table has the first line. Entries that use one axis of the
mesh in two ways are no pair.
"""


def trainer_section() -> str:
    """Returns the page's introduction and its section on the trainer."""
    kinds = ", ".join(f"`{choice.name}`" for choice in training.PARALLELISM[:3])
    return "\n".join((
        _counted(_INTRODUCTION, [training.run_options(run) for run in training.covering_runs()]),
        *_tables(training.CHOICES, training.pairs()),
        f"\nOptions that give one option two values, such as {kinds}, are no pair. Those that name"
        " no system are accepted where any kind of parallelism takes both.\n",
    ))  # fmt: skip


def fully_shard_section() -> str:
    """Returns the page's section on fully_shard."""
    return "\n".join((
        _counted(_FULLY_SHARD, [sharding.run_options(run) for run in sharding.covering_runs()]),
        *_tables(sharding.CHOICES, sharding.pairs()),
    ))  # fmt: skip


def plan_section() -> str:
    """Returns the page's section on `Plan` and `parallelize`."""
    found = planning.table()
    return "\n".join((
        _counted(_PLAN, [planning.run_options(run) for run in found.runs]),
        *_tables(
            planning.CHOICES,
            [replace(one, refusal=planning.sentence_of(one.refusal)) for one in found.pairs],
        ),
    ))  # fmt: skip


def _counted(text: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a paragraph with the number of runs, and of those on two ranks."""
    short = sum(options["ranks"] == 2 for options in runs)
    return text.format(runs=len(runs), short=short, long=len(runs) - short)


def _tables(choices: Iterable[Choice], pairs: Iterable[Pair]) -> Iterator[str]:
    yield "### What proves an option\n"
    rows = [(f"`{choice.name}`", choice.evidence) for choice in choices]
    yield render_table(
        Table((Column("option"), Column("observed in a run that has it")), tuple(rows))
    )
    yield "\n### What is refused\n"
    refused: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.refusal is not None:
            refused.setdefault(pair.refusal, []).append(
                f"`{pair.first.name}` with `{pair.second.name}`"
            )
    rows = [("<br>".join(names), sentence) for sentence, names in refused.items()]
    yield render_table(Table((Column("options"), Column("sentence")), tuple(rows)))


@dataclass(frozen=True)
class _Section:
    """A section of the page, with the options that it is on."""

    write: Callable[[], str]
    options: Sequence[Choice]


_SECTIONS = {
    "the trainer": _Section(trainer_section, training.CHOICES),
    "fully_shard": _Section(fully_shard_section, sharding.CHOICES),
    "Plan and parallelize": _Section(plan_section, planning.CHOICES),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m integration.option_table", description=__doc__)
    parser.add_argument(
        "page", metavar="PAGE", nargs="?", type=Path, default=Path("docs/support/options.md")
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parsed = parser.parse_args(arguments)
    texts = []
    with ProgressBar() as bar:
        for number, (name, section) in enumerate(_SECTIONS.items(), 1):
            bar.begin(name, number, len(_SECTIONS))
            texts.append(section.write())
    parsed.page.write_text("\n".join(texts) + "\n")
    options = {name: len(section.options) for name, section in _SECTIONS.items()}
    counts = ", ".join(f"{number} of {name}" for name, number in options.items())
    sentence = f"written: options, {counts}: {parsed.page}"
    print_result(sentence, {"page": parsed.page, "options": options}, as_json=parsed.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
