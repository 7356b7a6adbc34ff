"""What ranks tell each other through the store while one of them is stopped."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

__all__ = ["Meeting", "place"]

_END = "end"


@dataclass(frozen=True)
class Meeting:
    """One stop of all ranks.

    Attributes:
        store: for this stop alone.
        rank: this one.
        size: how many there are.
        stopped: the rank with the prompt.
    """

    store: dist.Store
    rank: int
    size: int
    stopped: int

    def arrive(self, frame: FrameType) -> None:
        """This rank waits here."""
        self.store.set(f"at/{self.rank}", f"{time.time()} {place(frame)}")

    def end(self, *, quits: bool) -> None:
        """The others go on, or end as well."""
        self.store.set(_END, "quit" if quits else "go on")

    @property
    def ended(self) -> bool:
        """Whether they do."""
        return bool(self.store.check([_END]))

    @property
    def quits(self) -> bool:
        """Whether they end; once it has ended."""
        return bool(self.store.get(_END) == b"quit")

    def where(self, rank: int) -> str:
        """Where another rank waits, and for how long."""
        key = f"at/{rank}"
        if not self.store.check([key]):
            return "is not here yet"
        since, _, at = self.store.get(key).decode().partition(" ")
        return f"waits at {at}, for {max(0.0, time.time() - float(since)):.0f} s"


def place(frame: FrameType) -> str:
    """As in ``train.py:12 in step``."""
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
