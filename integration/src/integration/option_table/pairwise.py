"""Selects runs in which every accepted pair of options occurs (a pairwise covering array)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

__all__ = ["Choice", "Completion", "Pair", "Run", "covering_runs", "merged", "pairs", "uncovered"]


@dataclass(frozen=True)
class Choice:
    """One value of an option, with the other options that it requires.

    Attributes:
        name: the option as a user writes it.
        evidence: the observation that proves the option, as a clause.
        proof: whether the observations of all ranks prove it, given all options of the run.
        options: options by name.
    """

    name: str
    evidence: str
    proof: Callable[[tuple[Any, ...], Mapping[str, Any]], bool] = field(compare=False)
    options: Mapping[str, Any] = field(compare=False)


Run = tuple[Choice, ...]


@dataclass(frozen=True)
class Pair:
    """Two choices that give no option different values.

    Attributes:
        refusal: the error's sentence; None: the pair is accepted.
    """

    first: Choice
    second: Choice
    refusal: str | None


@dataclass(frozen=True)
class Completion:
    """Choices completed to a run, if validation accepts them.

    Attributes:
        run: the choices of a run, in the table's order; empty where they are refused.
        refusal: the error's sentence; None: they are accepted.
    """

    run: Run
    refusal: str | None


def merged(choices: Sequence[Choice]) -> dict[str, Any] | None:
    """Returns the options of all ``choices``; None where two give one option different values."""
    options: dict[str, Any] = {}
    for choice in choices:
        for name, value in choice.options.items():
            if options.setdefault(name, value) != value:
                return None
    return options


def pairs(choices: Run, complete: Callable[[Run], Completion]) -> tuple[Pair, ...]:
    """Returns every compatible pair of choices, with its refusal if any.

    Args:
        choices: choices of a table.
        complete: validates choices, which are in the table's order.
    """
    together = [two for two in combinations(choices, 2) if merged(two) is not None]
    return tuple(Pair(*two, complete(two).refusal) for two in together)


def covering_runs(
    choices: Run,
    complete: Callable[[Run], Completion],
    accepts: Callable[[Run], bool],
    made: tuple[Run, ...] = (),
) -> tuple[Run, ...]:
    """Returns runs in which each accepted pair of choices occurs, and so each choice.

    The search is greedy: a run starts with an uncovered pair, and the choice that covers the most
    uncovered pairs is added while the run is accepted.

    Args:
        choices: see `pairs`.
        complete: see `pairs`.
        accepts: whether a run of more than two choices is allowed, in addition to validation.
        made: existing runs, whose pairs count as covered.
    """
    found = pairs(choices, complete)
    accepted = {frozenset((p.first, p.second)): None for p in found if p.refusal is None}
    covered = {frozenset(two) for run in made for two in combinations(run, 2)}
    missing = {two: None for two in accepted if two not in covered}
    runs: list[Run] = []
    while missing:
        start = next(iter(missing))
        run = [choice for choice in choices if choice in start]
        left = [choice for choice in choices if choice not in start]
        while left:
            gains = [sum(frozenset((each, one)) in missing for one in run) for each in left]
            if max(gains) == 0:
                break
            best = left.pop(gains.index(max(gains)))
            together = tuple(choice for choice in choices if choice in (*run, best))
            fits = all(frozenset((best, one)) in accepted for one in run)
            if fits and accepts(together) and complete(together).run:
                run.append(best)
        whole = complete(tuple(choice for choice in choices if choice in run)).run
        assert whole
        for two in combinations(whole, 2):
            missing.pop(frozenset(two), None)
        runs.append(whole)
    return tuple(runs)


def uncovered(pairs: Sequence[Pair], runs: Sequence[Run]) -> list[Pair]:
    """Returns the accepted pairs that occur together in no run."""
    covered = {frozenset(two) for run in runs for two in combinations(run, 2)}
    return [p for p in pairs if p.refusal is None and frozenset((p.first, p.second)) not in covered]
