"""Selects runs in which every accepted pair of options occurs (a pairwise covering array)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

__all__ = [
    "Choice",
    "Completion",
    "Pair",
    "Run",
    "covering_runs",
    "merged",
    "pairs",
    "proving_runs",
    "rank_choice",
    "run_options",
    "uncovered",
]


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


def rank_choice(
    name: str, evidence: str, proof: Callable[[Any, Mapping[str, Any]], bool], **options: Any
) -> Choice:
    """Returns a choice that the observation of every rank has to prove.

    Args:
        name: see `Choice`.
        evidence: see `Choice`.
        proof: whether one rank's observation proves it, given all options of the run.
        options: options by name.
    """
    return Choice(
        name, evidence, lambda ranks, given: all(proof(rank, given) for rank in ranks), options
    )


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


def run_options(choices: Run, ranks_of: Callable[[Mapping[str, Any]], int]) -> dict[str, Any]:
    """Returns all options of a run of ``choices``, and its number of ``ranks``."""
    options = merged(choices) or {}
    return options | {"ranks": ranks_of(options)}


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
    existing: tuple[Run, ...] = (),
) -> tuple[Run, ...]:
    """Returns runs in which each accepted pair of choices occurs, and so each choice.

    The search is greedy: a run starts with an uncovered pair, and the choice that covers the most
    uncovered pairs is added while the run is accepted.

    Args:
        choices: see `pairs`.
        complete: see `pairs`.
        accepts: whether a run of more than two choices, completed, is allowed, in addition to
            validation.
        existing: runs whose pairs count as covered.
    """
    accepted = {
        frozenset((pair.first, pair.second)): None
        for pair in pairs(choices, complete)
        if pair.refusal is None
    }
    covered = {frozenset(two) for run in existing for two in combinations(run, 2)}
    missing = {two: None for two in accepted if two not in covered}
    runs: list[Run] = []
    while missing:
        start = next(iter(missing))
        run = [choice for choice in choices if choice in start]
        remaining = [choice for choice in choices if choice not in start]
        while remaining:
            gains = [sum(frozenset((each, one)) in missing for one in run) for each in remaining]
            if max(gains) == 0:
                break
            best = remaining.pop(gains.index(max(gains)))
            together = tuple(choice for choice in choices if choice in (*run, best))
            fits = all(frozenset((best, one)) in accepted for one in run)
            if fits and (found := complete(together).run) and accepts(found):
                run.append(best)
        completed = complete(tuple(choice for choice in choices if choice in run)).run
        assert completed
        for two in combinations(completed, 2):
            missing.pop(frozenset(two), None)
        runs.append(completed)
    return tuple(runs)


def proving_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Returns a few of ``runs`` in which each of their choices occurs, though not each pair.

    Runs that alone have a choice are first, as they are needed. Then the search is greedy: the next
    run is that with the most choices that are in none before, for its cost, and of several the one
    with the fewest others, which make it longer and prove nothing new. A run that compiles costs as
    much as three others.
    """
    times = Counter(choice for run in runs for choice in run)
    chosen = [run for run in runs if any(times[choice] == 1 for choice in run)]
    missing = set(times).difference(*chosen)

    def value(run: Run) -> tuple[float, int]:
        compiles = any("compile" in choice.options for choice in run)
        return len(missing.intersection(run)) / (3 if compiles else 1), -len(run)

    while missing:
        chosen.append(max(runs, key=value))
        missing.difference_update(chosen[-1])
    return tuple(chosen)


def uncovered(pairs: Sequence[Pair], runs: Sequence[Run]) -> list[Pair]:
    """Returns the accepted pairs that occur together in no run."""
    covered = {frozenset(two) for run in runs for two in combinations(run, 2)}
    return [
        pair
        for pair in pairs
        if pair.refusal is None and frozenset((pair.first, pair.second)) not in covered
    ]
