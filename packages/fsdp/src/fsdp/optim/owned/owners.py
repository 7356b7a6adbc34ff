"""Which rank computes on which matrix: computed alike on all ranks, without a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Load", "choose_owners"]


@dataclass(frozen=True)
class Load:
    """What is known of a matrix when its owner is chosen.

    Attributes:
        work: of a step.
        held: elements by rank.
        fixed: its owner, if that was decided when it was placed (`Whole()`).
    """

    work: int
    held: tuple[int, ...]
    fixed: int | None = None


def choose_owners(loads: Sequence[Load], ranks: int) -> list[int]:
    """An owner for each matrix: largest work first, where most of it lies, and the work balanced.

    A rank may be given what it holds most of up to an equal share of all work; what fits nowhere
    goes to the rank that has least to do.

    Args:
        loads: of the matrices, in the same order on all ranks.
        ranks: along the axis.
    """
    owners = [0 if load.fixed is None else load.fixed for load in loads]
    busy = [0] * ranks
    for load in loads:
        if load.fixed is not None:
            busy[load.fixed] += load.work
    share = sum(load.work for load in loads) / ranks
    free = [number for number, load in enumerate(loads) if load.fixed is None]
    for number in sorted(free, key=lambda number: -loads[number].work):
        load = loads[number]
        least = min(busy)
        room = [r for r in range(ranks) if busy[r] + load.work <= share or busy[r] == least]
        owner = max(room, key=lambda r: (load.held[r], -busy[r], -r))
        owners[number] = owner
        busy[owner] += load.work
    return owners
