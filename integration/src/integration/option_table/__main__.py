"""``python -m integration.option_table``: writes docs/options.md from the table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from integration.option_table.choices import CHOICES, PARALLELISM, Choice
from integration.option_table.covering import covering_runs, pairs, run_options

_INTRODUCTION = """# Options of the trainer

Every option of `python -m integration.train` that changes how a step is executed, with the
observation that proves that it is in effect. Any two of them are in effect together, or refused
before a process starts, with exit code 2 and a sentence.

`integration/tests/test_option_table.py` observes all accepted pairs in {runs} runs of `llama-tiny`
and `mixtral-tiny`: {short} on 2 ranks with the other tests, {long} on 4 ranks in
`nox -s nightly`. This page is written by `python -m integration.option_table`, from the data of
those tests.
"""


def page() -> str:
    """Returns the page, as Markdown."""
    runs = covering_runs()
    short = sum(run_options(run)["ranks"] == 2 for run in runs)
    parts = [_INTRODUCTION.format(runs=len(runs), short=short, long=len(runs) - short)]
    parts.append("## What proves an option\n")
    parts.append(_table(("option", "observed in a run that has it"), map(_row, CHOICES)))
    parts.append("\n## What is refused\n")
    refused: dict[str, list[str]] = {}
    for pair in pairs():
        if pair.refusal is not None:
            refused.setdefault(pair.refusal, []).append(
                f"`{pair.first.name}` with `{pair.second.name}`"
            )
    rows = (("<br>".join(names), sentence) for sentence, names in refused.items())
    parts.append(_table(("options", "sentence"), rows))
    kinds = ", ".join(f"`{choice.name}`" for choice in PARALLELISM[:3])
    parts.append(
        f"\nOptions that give one option two values, such as {kinds}, are no pair. Those that name"
        " no system are accepted where any kind of parallelism takes both.\n"
    )
    return "\n".join(parts)


def _row(choice: Choice) -> tuple[str, str]:
    return f"`{choice.name}`", choice.evidence


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---|---|"]
    lines += [f"| {left} | {right} |" for left, right in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/options.md").write_text(page())
