"""Finds out from the snapshots of all ranks which rank the others wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fused_comm.diagnosis.flight_recorder import RecordedCollective
from fused_comm.diagnosis.rank_snapshot import RankSnapshot

__all__ = ["compare_snapshots"]


def compare_snapshots(snapshots: Sequence[RankSnapshot]) -> list[str]:
    """Returns sentences on how ranks differ, then one line per rank with its position.

    For each process group: the first collective that ranks have started differently, or the ranks
    that have not reached a collective which others have started. gloo does not record the end of
    collectives, so nothing can be said of a collective that all ranks have started alike.

    Args:
        snapshots: of some ranks, at most one of each.
    """
    if not snapshots:
        return []
    snapshots = sorted(snapshots, key=lambda snapshot: snapshot.rank)
    differences = [line for group in _groups(snapshots) for line in _differences(group, snapshots)]
    lines = [*_missing_ranks(snapshots), *differences]
    if not differences and len(snapshots) > 1:
        lines.append(
            "these ranks have started the same collectives in every group: see where each rank is"
        )
    return lines + [f"rank {snapshot.rank} is at {snapshot.headline}" for snapshot in snapshots]


def _missing_ranks(snapshots: Sequence[RankSnapshot]) -> Iterator[str]:
    present = {snapshot.rank for snapshot in snapshots}
    missing = sorted(set(range(snapshots[0].world_size)) - present)
    if missing:
        yield (
            f"{_ranks(missing)} gave no answer: dead, not in a Watch, not late yet, or in code "
            f"that does not release the GIL"
        )


def _groups(snapshots: Sequence[RankSnapshot]) -> list[str]:
    """Returns the groups with collectives; sends and receives may start in any order."""
    return list(
        dict.fromkeys(
            collective.group
            for snapshot in snapshots
            for collective in snapshot.collectives
            if not collective.is_p2p
        )
    )


def _differences(group: str, snapshots: Sequence[RankSnapshot]) -> Iterator[str]:
    """Returns at most one sentence, as collectives after a difference cannot be compared."""
    started = {
        snapshot.rank: {
            collective.number: collective
            for collective in snapshot.collectives
            if collective.group == group and not collective.is_p2p
        }
        for snapshot in snapshots
    }
    ranks = next(one.ranks for by_number in started.values() for one in by_number.values())
    started = {rank: by_number for rank, by_number in started.items() if rank in ranks}
    for number in sorted({number for by_number in started.values() for number in by_number}):
        by_rank = {rank: of[number] for rank, of in started.items() if number in of}
        if len({one.common_signature for one in by_rank.values()}) > 1:
            yield f"{_label(by_rank)}: ranks differ from number {number} on: {_listed(by_rank)}"
            return
    newest = {rank: max(by_number, default=0) for rank, by_number in started.items()}
    first = min(newest.values()) + 1
    ahead = {rank: started[rank][first] for rank in newest if first in started[rank]}
    if ahead:
        behind = [rank for rank, number in newest.items() if number < first]
        yield (
            f"{_label(ahead)}: {_ranks(behind)} did not reach number {first}, which others have "
            f"started: {_listed(ahead)}"
        )


def _listed(by_rank: Mapping[int, RecordedCollective]) -> str:
    return "; ".join(
        f"rank {rank} {one.signature}, by {' < '.join(one.packages)}"
        for rank, one in by_rank.items()
    )


def _label(by_rank: Mapping[int, RecordedCollective]) -> str:
    return next(iter(by_rank.values())).group_label


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
