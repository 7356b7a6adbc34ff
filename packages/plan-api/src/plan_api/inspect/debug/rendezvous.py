"""Tells ranks through the store where the others are while one of them is stopped."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

__all__ = ["Rendezvous", "format_frame"]

_END = "end"


@dataclass(frozen=True)
class Rendezvous:
    """One stop of all ranks.

    Attributes:
        store: for this stop only.
        rank: this rank.
        size: the number of ranks.
        stopped: the rank with the prompt.
    """

    store: dist.Store
    rank: int
    size: int
    stopped: int

    def arrive(self, frame: FrameType) -> None:
        """Publishes that this rank waits in a frame."""
        self.store.set(f"at/{self.rank}", f"{time.time()} {format_frame(frame)}")

    def end(self, *, quits: bool) -> None:
        """Lets the other ranks continue, or ends them."""
        self.store.set(_END, "quit" if quits else "go on")

    @property
    def ended(self) -> bool:
        """Whether the prompt has been left."""
        return bool(self.store.check([_END]))

    @property
    def quits(self) -> bool:
        """Whether the ranks end; valid once it has `ended`."""
        return bool(self.store.get(_END) == b"quit")

    def describe_rank(self, rank: int) -> str:
        """Describes where another rank waits, and for how long."""
        key = f"at/{rank}"
        if not self.store.check([key]):
            return "is not here yet"
        since, _, at = self.store.get(key).decode().partition(" ")
        return f"waits at {at}, for {max(0.0, time.time() - float(since)):.0f} s"


def format_frame(frame: FrameType) -> str:
    """Returns a frame as in ``train.py:12 in step``."""
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
