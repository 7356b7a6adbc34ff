"""Which rank others wait for, from what all of them do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fused_comm.diagnosis.recorder import Recorded
from fused_comm.diagnosis.stand import Stand

__all__ = ["compare"]


def compare(stands: Sequence[Stand]) -> list[str]:
    """Sentences on how ranks differ, then where each of them stands.

    Of each process group: the first collective that ranks have started differently, or those ranks
    that have not come to one which others have started. gloo does not note which collectives have
    ended, so of a collective that all have started alike nothing can be said.

    Args:
        stands: of some ranks, at most one of each.
    """
    if not stands:
        return []
    stands = sorted(stands, key=lambda stand: stand.rank)
    found = list(_silent(stands))
    differences = [one for group in _groups(stands) for one in _of_group(group, stands)]
    found += differences
    if not differences and len(stands) > 1:
        found.append(
            "these ranks have started the same collectives in every group: see where each stands"
        )
    return found + [f"rank {stand.rank} stands at {stand.headline}" for stand in stands]


def _silent(stands: Sequence[Stand]) -> Iterator[str]:
    missing = sorted(set(range(stands[0].size)) - {stand.rank for stand in stands})
    if missing:
        yield (
            f"{_ranks(missing)} gave no answer: dead, not in a Watch, not late yet, or in code "
            f"that keeps Python's lock"
        )


def _groups(stands: Sequence[Stand]) -> list[str]:
    """Names of process groups; sends and receives are not in the same order on all ranks."""
    return list(
        dict.fromkeys(one.group for stand in stands for one in stand.recorded if not one.paired)
    )


def _of_group(group: str, stands: Sequence[Stand]) -> Iterator[str]:
    started = {
        stand.rank: {
            one.number: one for one in stand.recorded if one.group == group and not one.paired
        }
        for stand in stands
    }
    ranks = next(one.ranks for by_number in started.values() for one in by_number.values())
    started = {rank: by_number for rank, by_number in started.items() if rank in ranks}
    numbers = sorted({number for by_number in started.values() for number in by_number})
    for number in numbers:
        here = {rank: of[number] for rank, of in started.items() if number in of}
        if len({one.alike for one in here.values()}) > 1:
            yield f"{_any(here).place}: ranks differ from number {number} on: {_each(here)}"
            return
    newest = {rank: max(by_number, default=0) for rank, by_number in started.items()}
    first = min(newest.values()) + 1
    ahead = {rank: started[rank][first] for rank in newest if first in started[rank]}
    if ahead:
        behind = [rank for rank, number in newest.items() if number < first]
        yield (
            f"{_any(ahead).place}: {_ranks(behind)} did not come to number {first}, which others "
            f"have started: {_each(ahead)}"
        )


def _each(calls: Mapping[int, Recorded]) -> str:
    return "; ".join(
        f"rank {rank} {one.call}, by {' < '.join(one.packages)}" for rank, one in calls.items()
    )


def _any(calls: Mapping[int, Recorded]) -> Recorded:
    return next(iter(calls.values()))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
