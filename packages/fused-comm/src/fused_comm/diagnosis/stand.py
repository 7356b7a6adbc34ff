"""What one rank does at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fused_comm.diagnosis.recorder import Recorded, recorded
from fused_comm.diagnosis.stack import Level, Place, behind, packages

__all__ = ["Stand", "stand_of"]


@dataclass(frozen=True)
class Stand:
    """What a rank does; `str` makes a paragraph. It can be pickled.

    Attributes:
        rank: whose.
        size: of the world.
        doing: what the program calls what it does, as ``"step 7"``; may be empty.
        why: it was asked.
        place: the innermost line of Python.
        packages: on the stack, the innermost first.
        behind: what it is for: buffers, parameters, modules, entries of a plan.
        recorded: its newest collectives, the newest last.
    """

    rank: int
    size: int
    doing: str
    why: str
    place: Place
    packages: tuple[str, ...]
    behind: tuple[str, ...]
    recorded: tuple[Recorded, ...]

    @property
    def newest(self) -> tuple[Recorded, ...]:
        """Of each process group, of collectives and of sends and receives, the newest."""
        return tuple({(one.group, one.paired): one for one in self.recorded}.values())

    @property
    def headline(self) -> str:
        """Where it stands, why, and for what, in one line."""
        owner = f" ({' < '.join(self.packages)})" if self.packages else ""
        said = ", ".join(one for one in (self.doing, self.why) if one)
        return f"({said}) {self.place}{owner}" + "".join(f"; for {one}" for one in self.behind)

    def __str__(self) -> str:
        doing = f", {self.doing}" if self.doing else ""
        lines = [
            f"rank {self.rank} of {self.size}{doing}: {self.why}",
            f"  stands at {self.place}",
            f"  called by {' < '.join(self.packages)}",
            *(f"  for {one}" for one in self.behind),
            *(
                f"  newest {'send or receive' if one.paired else 'collective'} of {one.place}: "
                f"{one}, started {one.seconds:.1f} s ago by {' < '.join(one.packages)}"
                for one in self.newest
            ),
        ]
        if not self.recorded:
            lines.append("  the flight recorder has no collectives (TORCH_FR_BUFFER_SIZE)")
        return "\n".join(lines)


def stand_of(levels: Sequence[Level], *, doing: str = "", why: str = "asked") -> Stand:
    """What this rank does.

    Args:
        levels: of the thread that trains, the innermost first.
        doing: see `Stand`.
        why: see `Stand`.

    Raises:
        ValueError: no process group, or no levels.
    """
    if not dist.is_initialized():
        raise ValueError("stand_of: there is no process group; call init_process_group() first")
    if not levels:
        raise ValueError("stand_of: no levels; give those of a thread that runs")
    return Stand(
        dist.get_rank(), dist.get_world_size(), doing, why, levels[0].place,
        packages(level.place for level in levels), behind(levels), recorded(),
    )  # fmt: skip
