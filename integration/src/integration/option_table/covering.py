"""Few runs in which every accepted pair of options occurs (a pairwise covering array)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from integration.errors import UsageError
from integration.option_table.choices import BASE, CHOICES, PARALLELISM, Choice, ranks_of
from integration.train.config import TrainConfig
from integration.train.validation import validate

# Of a run: a pair needs two axes of two ranks at most.
MOST_RANKS = 4


@dataclass(frozen=True)
class Pair:
    """Two choices that give no option different values.

    Attributes:
        refusal: the error's sentence; None: the pair is accepted.
    """

    first: Choice
    second: Choice
    refusal: str | None


def merged(choices: Sequence[Choice]) -> dict[str, Any] | None:
    """Returns the options of all ``choices``; None where two give one option different values."""
    options: dict[str, Any] = {}
    for choice in choices:
        for name, value in choice.options.items():
            if options.setdefault(name, value) != value:
                return None
    return options


def run_options(choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns all options of a run of ``choices``, the number of ranks included."""
    options = {**BASE, **(merged(choices) or {})}
    return options | {"ranks": ranks_of(options)}


@dataclass(frozen=True)
class Completion:
    """Choices with a kind of parallelism, as validation takes them.

    Attributes:
        run: the choices of a run, in the table's order; empty where they are refused.
        refusal: the error's sentence; None: they are accepted.
    """

    run: tuple[Choice, ...]
    refusal: str | None


@functools.cache
def completed(choices: tuple[Choice, ...]) -> Completion:
    """Adds to ``choices`` the first kind of parallelism by which they are accepted together."""
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
    """Returns every two choices that can be given together, with what validation says of them."""
    found = []
    for two in combinations(CHOICES, 2):
        if merged(two) is not None:
            found.append(Pair(*two, completed(two).refusal))
    return tuple(found)


@functools.cache
def covering_runs() -> tuple[tuple[Choice, ...], ...]:
    """Returns runs in which each accepted pair of choices occurs, and so each choice.

    Greedy: a run begins with a pair that no run has yet, and takes whatever choice adds most pairs
    that are missing, as long as all of it is accepted.
    """
    accepted = {frozenset((p.first, p.second)): None for p in pairs() if p.refusal is None}
    missing = dict(accepted)
    runs: list[tuple[Choice, ...]] = []
    while missing:
        start = next(iter(missing))
        run = [choice for choice in CHOICES if choice in start]
        left = [choice for choice in CHOICES if choice not in start]
        while left:
            gains = [sum(frozenset((each, one)) in missing for one in run) for each in left]
            if max(gains) == 0:
                break
            best = left.pop(gains.index(max(gains)))
            fits = all(frozenset((best, one)) in accepted for one in run)
            fits = fits and ranks_of(run_options((*run, best))) <= MOST_RANKS
            together = tuple(choice for choice in CHOICES if choice in (*run, best))
            if fits and completed(together).run:
                run.append(best)
        whole = completed(tuple(choice for choice in CHOICES if choice in run)).run
        assert whole
        for two in combinations(whole, 2):
            missing.pop(frozenset(two), None)
        runs.append(whole)
    return tuple(runs)
