"""Selects runs of the trainer in which every accepted pair of its options occurs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from integration.errors import UsageError
from integration.option_table import pairwise
from integration.option_table.choices import BASE, CHOICES, PARALLELISM, ranks_of
from integration.option_table.pairwise import Choice, Completion, Pair, Run, merged
from integration.train.config import TrainConfig
from integration.train.validation import validate

# Ranks of a run: a pair needs at most two axes of two ranks.
MOST_RANKS = 4


def run_options(choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns all options of a run of ``choices``, the number of ranks included."""
    options = {**BASE, **(merged(choices) or {})}
    return options | {"ranks": ranks_of(options)}


@functools.cache
def completed(choices: Run) -> Completion:
    """Adds to ``choices`` the first kind of parallelism with which they are accepted."""
    refusals = []
    for more in [(), *((kind,) for kind in PARALLELISM if kind not in choices)]:
        run = tuple(choice for choice in CHOICES if choice in (*choices, *more))
        options = merged(run)
        if options is None or "system" not in options:
            continue
        try:
            config = TrainConfig(**run_options(run))
            validate(config)
        except UsageError as error:
            refusals.append(str(error))
        else:
            return Completion(run, None)
    words = {word for choice in choices for word in choice.name.split() if word.startswith("--")}
    named = (text for text in refusals if any(word in text for word in words - {"--system"}))
    return Completion((), next(named, refusals[0]))


@functools.cache
def pairs() -> tuple[Pair, ...]:
    """Returns every compatible pair of choices, with its refusal if any."""
    return pairwise.pairs(CHOICES, completed)


@functools.cache
def covering_runs() -> tuple[Run, ...]:
    """Returns runs in which each accepted pair of choices occurs, and so each choice."""
    return pairwise.covering_runs(
        CHOICES, completed, lambda run: ranks_of(run_options(run)) <= MOST_RANKS
    )
