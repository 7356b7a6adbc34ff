"""Reads this rank's collectives from torch's flight recorder (c10d/FlightRecorder.hpp).

The flight recorder has the collectives of gloo and NCCL with their Python stacks, by default the
newest 2000.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch.distributed as dist

from fused_comm import _compat
from fused_comm.diagnosis.stack import CodeLocation, packages_of

__all__ = ["RecordedCollective", "recorded_collectives"]

_NEWEST = 50  # per process group: how far ranks can be apart and still be compared
# Ranks may pass tensors of different sizes to other operators.
_SAME_SIZES = frozenset({"all_reduce", "allreduce", "broadcast", "reduce", "reduce_scatter"})


@dataclass(frozen=True)
class RecordedCollective:
    """A collective that a rank has started.

    Attributes:
        group: the name of its process group.
        group_description: as ``mesh_tp`` of the axis ``tp`` of a mesh.
        ranks: the global ranks of the group.
        number: counts the collectives of the group; sends and receives are counted apart.
        operator: as ``all_reduce``.
        sizes: of the input tensors.
        dtypes: of the input tensors.
        seconds: since it was started.
        packages: that have started it, the innermost first.
        is_p2p: whether it is a send or a receive.
    """

    group: str
    group_description: str
    ranks: tuple[int, ...]
    number: int
    operator: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    seconds: float
    packages: tuple[str, ...]
    is_p2p: bool

    def __str__(self) -> str:
        return f"number {self.number}, {self.signature}"

    @property
    def signature(self) -> str:
        """The operator with dtypes and sizes."""
        inputs = ", ".join(
            f"{dtype} {list(size)}" for dtype, size in zip(self.dtypes, self.sizes, strict=True)
        )
        return f"{self.operator} of {inputs}" if inputs else self.operator

    @property
    def common_signature(self) -> str:
        """The part of the signature that has to be the same on all ranks of the group."""
        return self.signature if self.operator in _SAME_SIZES else self.operator

    @property
    def group_label(self) -> str:
        """The process group with its description and ranks."""
        return f"group {self.group} ({self.group_description}) of ranks {list(self.ranks)}"


def recorded_collectives() -> tuple[RecordedCollective, ...]:
    """Returns the newest collectives of each process group that exists, in order of their start."""
    now = time.time_ns()
    by_group: dict[tuple[str, bool], list[RecordedCollective]] = {}
    for entry in _compat.flight_recorder_entries():
        process_group = _compat.process_group_named(entry["process_group"][0])
        if process_group is None:
            continue  # it was destroyed
        one = _recorded(entry, dist.get_process_group_ranks(process_group), now)
        if not one.is_p2p and one.number > _compat.started_collectives(process_group):
            continue  # of a destroyed group of the same name
        group = by_group.setdefault((one.group, one.is_p2p), [])
        if group and one.number < group[-1].number + (not one.is_p2p):
            group.clear()  # these are of a destroyed group too: numbers of one group only grow
        group.append(one)
    newest = [one for recorded in by_group.values() for one in recorded[-_NEWEST:]]
    return tuple(sorted(newest, key=lambda one: -one.seconds))


def _recorded(entry: _compat.FlightRecorderEntry, ranks: list[int], now: int) -> RecordedCollective:
    group, description = entry["process_group"]
    is_p2p = bool(entry["is_p2p"])
    stack = [CodeLocation(at["filename"], at["line"], at["name"]) for at in entry.get("frames", ())]
    return RecordedCollective(
        group,
        description,
        tuple(ranks),
        entry["p2p_seq_id"] if is_p2p else entry["collective_seq_id"],
        entry["profiling_name"].rpartition(":")[2],
        tuple(tuple(size) for size in entry["input_sizes"]),
        tuple(entry["input_dtypes"]),
        (now - entry["time_created_ns"]) / 1e9,
        packages_of(stack),
        is_p2p,
    )
