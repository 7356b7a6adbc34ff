"""What torch's flight recorder has of this rank's collectives (c10d/FlightRecorder.hpp).

It notes collectives of gloo and NCCL with their Python stacks, by default the newest 2000.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch.distributed as dist

from fused_comm import _compat
from fused_comm.diagnosis.stack import Place, packages

__all__ = ["Recorded", "recorded"]

_KEPT = 50  # of each process group: how far ranks can be apart and still be compared
# Of others, ranks may give tensors of different sizes.
_ALIKE = frozenset({"all_reduce", "allreduce", "broadcast", "reduce", "reduce_scatter"})


@dataclass(frozen=True)
class Recorded:
    """A collective that a rank has started.

    Attributes:
        group: the name of its process group.
        description: of the group, as ``mesh_tp`` of the axis ``tp`` of a mesh.
        ranks: of the group.
        number: the how manieth collective of the group it is; of sends and receives, of these.
        operator: as ``all_reduce``.
        sizes: of the tensors given.
        dtypes: of the tensors given.
        seconds: since it was started.
        packages: that started it, the innermost first.
        paired: whether it is a send or a receive.
    """

    group: str
    description: str
    ranks: tuple[int, ...]
    number: int
    operator: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    seconds: float
    packages: tuple[str, ...]
    paired: bool

    def __str__(self) -> str:
        return f"number {self.number}, {self.call}"

    @property
    def call(self) -> str:
        """The operator with dtypes and sizes."""
        given = ", ".join(
            f"{dtype} {list(size)}" for dtype, size in zip(self.dtypes, self.sizes, strict=True)
        )
        return f"{self.operator} of {given}" if given else self.operator

    @property
    def place(self) -> str:
        """The process group in words."""
        return f"group {self.group} ({self.description}) of ranks {list(self.ranks)}"

    @property
    def alike(self) -> str:
        """What has to be the same on all ranks of the group."""
        return self.call if self.operator in _ALIKE else self.operator


def recorded() -> tuple[Recorded, ...]:
    """The newest collectives of each process group there is, in the order of their start."""
    now = time.time_ns()
    by_group: dict[tuple[str, bool], list[Recorded]] = {}
    for entry in _compat.flight_records():
        process_group = _compat.group_named(entry["process_group"][0])
        if process_group is None:
            continue  # it is no more
        one = _recorded(entry, dist.get_process_group_ranks(process_group), now)
        if not one.paired and one.number > _compat.collectives_of(process_group):
            continue  # of a group of the same name that is no more
        group = by_group.setdefault((one.group, one.paired), [])
        if group and one.number < group[-1].number + (not one.paired):
            group.clear()  # they too
        group.append(one)
    newest = [one for kept in by_group.values() for one in kept[-_KEPT:]]
    return tuple(sorted(newest, key=lambda one: -one.seconds))


def _recorded(entry: _compat.FlightRecord, ranks: list[int], now: int) -> Recorded:
    group, description = entry["process_group"]
    paired = bool(entry["is_p2p"])
    places = [Place(at["filename"], at["line"], at["name"]) for at in entry.get("frames", ())]
    return Recorded(
        group,
        description,
        tuple(ranks),
        entry["p2p_seq_id"] if paired else entry["collective_seq_id"],
        entry["profiling_name"].rpartition(":")[2],
        tuple(tuple(size) for size in entry["input_sizes"]),
        tuple(entry["input_dtypes"]),
        (now - entry["time_created_ns"]) / 1e9,
        packages(places),
        paired,
    )
