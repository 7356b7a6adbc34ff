"""One bucket on its way: packed, sent, and received."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from fused_comm import _compat
from fused_comm.axes import FlatGroup
from fused_comm.bucket import Bucket
from fused_comm.pack import pack
from fused_comm.scale import divisors

__all__ = ["Flight", "Times"]

_T = TypeVar("_T")


@dataclass
class Times:
    """When a bucket's collectives were started and waited for, in seconds of time.perf_counter.

    Attributes:
        launched: the first was started.
        waits: begin and end of each wait.
    """

    launched: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)


class Flight:
    """The collectives of one bucket, each started when the one before has arrived.

    Args:
        bucket: the plan of the buffer.
        names: of the parameters in it, for messages.
        buffer: of ``bucket.numel`` elements.
        rest: whether it is sent again, with what came after it was sent.
    """

    def __init__(
        self, bucket: Bucket, names: list[str], buffer: torch.Tensor, rest: bool = False
    ) -> None:
        self.bucket = bucket
        self._rest = rest
        self.names = names
        self.times = Times()
        self.collectives = 0
        self.given: set[int] = set()  # parameters with a gradient here
        self._data = buffer
        self._source: torch.Tensor | None = None
        self._work: dist.Work | None = None
        route = bucket.route
        self._left: list[tuple[FlatGroup, bool]] = [
            *((group, True) for group in route.scattered),
            *((group, False) for group in route.reduced),
        ]

    def launch(self, locals_: Mapping[int, torch.Tensor]) -> None:
        """Packs local gradients and starts the first."""
        self.times.launched = time.perf_counter()
        before, _ = divisors(self.bucket.route)
        pack(self.bucket, locals_, self._data, before, first=not self._rest)
        self.given = set(locals_)
        self._start()

    def advance(self) -> None:
        """Waits for what is under way and starts the next, if there is more than one in all."""
        if len(self.bucket.route.scattered) + len(self.bucket.route.reduced) > 1 and self._left:
            self._next()

    def vacate(self) -> None:
        """Waits until what is scattered is sent, so that its buffer can be filled again."""
        if self._source is not None:
            self._next()

    def land(self) -> torch.Tensor:
        """Waits for everything: this rank's row, scaled.

        Raises:
            RuntimeError: a collective failed, or other ranks have not sent this bucket again.
        """
        while self._work is not None or self._left:
            self._next()
        _, after = divisors(self.bucket.route)
        # A flight is kept for the report, and must not keep gradients that nobody has.
        row, self._data = self._data.view(-1), self._data.new_empty(0)
        if self._rest and row[self.bucket.first_flag].item() > 0:
            raise RuntimeError(
                f"gradients of {', '.join(self.names)} came several times on this rank, and at "
                f"most once on another: call finish() after each backward, or make all but the "
                f"last in no_sync()"
            )
        return row if after == 1.0 else row.div_(after)

    def _next(self) -> None:
        self._wait()
        self._start()

    def _start(self) -> None:
        while self._left and self._work is None:
            group, scattered = self._left.pop(0)
            if group.size > 1:
                self.collectives += 1
                send = self._scatter if scattered else self._reduce
                self._work = self._named(partial(send, group.group))

    def _scatter(self, group: dist.ProcessGroup) -> dist.Work:
        self._source = self._data  # is read until the work is done
        self._data = self._source.new_empty(self._source.numel() // group.size())
        return _compat.reduce_scatter(self._data, self._source, dist.ReduceOp.SUM, group)

    def _reduce(self, group: dist.ProcessGroup) -> dist.Work:
        return _compat.all_reduce(self._data, dist.ReduceOp.SUM, group)

    def _wait(self) -> None:
        if self._work is None:
            return
        begin = time.perf_counter()
        work, self._work = self._work, None
        self._named(work.wait)
        self._source = None
        self.times.waits.append((begin, time.perf_counter()))

    def _waits_for_(self) -> str:
        """For `fused_comm.diagnosis`."""
        return (
            f"fused-comm: bucket of {self.bucket.nbytes} bytes, {self.bucket.route}, with the "
            f"gradients of {', '.join(self.names)}"
        )

    def _named(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as error:
            raise RuntimeError(
                f"the reduction of a bucket of {self.bucket.nbytes} bytes failed, with the "
                f"gradients of {', '.join(self.names)}: {error}"
            ) from error
