"""What a group asks of the thing that gathers its parameters."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Gather"]


class Gather(Protocol):
    """Gathers a group's unsharded parameters, and lets them go."""

    @property
    def under_way(self) -> bool:
        """Whether a gather was started and not finished."""
        ...

    def start(self, *, for_backward: bool) -> None:
        """Issues the gather; for backward it may be of what forward has kept."""
        ...

    def finish(self) -> None:
        """Makes the current stream wait for it; the unsharded parameters are valid then."""
        ...

    def release(self, *, after_forward: bool) -> None:
        """Gives the memory back; after forward, what backward gathers from may be kept."""
        ...

    def forget_kept(self) -> None:
        """Lets go of what forward has kept."""
        ...
