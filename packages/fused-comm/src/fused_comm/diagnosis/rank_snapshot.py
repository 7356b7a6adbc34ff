"""Takes a snapshot of one rank: its position, what it waits for, its newest collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fused_comm.diagnosis.flight_recorder import RecordedCollective, recorded_collectives
from fused_comm.diagnosis.stack import CodeLocation, StackFrame, packages_of, waits_for

__all__ = ["RankSnapshot", "take_snapshot"]


@dataclass(frozen=True)
class RankSnapshot:
    """What a rank does at one moment; `str` makes a paragraph. It can be pickled.

    Attributes:
        rank: of the process.
        world_size: number of ranks.
        activity: the program's name of what it does, as ``"step 7"``; may be empty.
        reason: why the snapshot was taken.
        location: the innermost line of Python.
        packages: on the stack, the innermost first.
        waits_for: buffers, parameters, modules, entries of a plan that the stack is about.
        collectives: the newest collectives of this rank, the newest last.
    """

    rank: int
    world_size: int
    activity: str
    reason: str
    location: CodeLocation
    packages: tuple[str, ...]
    waits_for: tuple[str, ...]
    collectives: tuple[RecordedCollective, ...]

    @property
    def newest(self) -> tuple[RecordedCollective, ...]:
        """The newest collective of each process group, and its newest send or receive."""
        return tuple(
            {
                (collective.group, collective.is_p2p): collective for collective in self.collectives
            }.values()
        )

    @property
    def headline(self) -> str:
        """Activity, reason, location, and what the rank waits for, in one line."""
        owner = f" ({' < '.join(self.packages)})" if self.packages else ""
        head = ", ".join(part for part in (self.activity, self.reason) if part)
        return f"({head}) {self.location}{owner}" + "".join(
            f"; for {one}" for one in self.waits_for
        )

    def __str__(self) -> str:
        activity = f", {self.activity}" if self.activity else ""
        lines = [
            f"rank {self.rank} of {self.world_size}{activity}: {self.reason}",
            f"  at {self.location}",
            f"  called by {' < '.join(self.packages)}",
            *(f"  for {one}" for one in self.waits_for),
            *(
                f"  newest {'send or receive' if one.is_p2p else 'collective'} of "
                f"{one.group_label}: {one}, started {one.seconds:.1f} s ago by "
                f"{' < '.join(one.packages)}"
                for one in self.newest
            ),
        ]
        if not self.collectives:
            lines.append("  the flight recorder has no collectives (TORCH_FR_BUFFER_SIZE)")
        return "\n".join(lines)


def take_snapshot(
    frames: Sequence[StackFrame], *, activity: str = "", reason: str = "requested"
) -> RankSnapshot:
    """Takes a snapshot of this rank.

    Args:
        frames: of the thread that trains, the innermost first.
        activity: as in `RankSnapshot`.
        reason: as in `RankSnapshot`.

    Raises:
        ValueError: no process group, or no frames.
    """
    if not dist.is_initialized():
        raise ValueError(
            "take_snapshot: there is no process group; call init_process_group() first"
        )
    if not frames:
        raise ValueError("take_snapshot: expected the frames of a running thread, got no frames")
    return RankSnapshot(
        dist.get_rank(), dist.get_world_size(), activity, reason, frames[0].location,
        packages_of(frame.location for frame in frames), waits_for(frames), recorded_collectives(),
    )  # fmt: skip
