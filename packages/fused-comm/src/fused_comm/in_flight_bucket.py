"""Issues the collectives of one bucket: packs the gradients, sends, waits, returns views.

A gradient is copied once, into the buffer, and never out: results are views of the received row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from fused_comm import _compat
from fused_comm.bucket import Bucket, Slot
from fused_comm.narrow_sums import NarrowSum, narrow_all_reduce, narrow_reduce_scatter

__all__ = ["BucketTimes", "InFlightBucket", "any_rank_has", "pack", "shard_view"]

_T = TypeVar("_T")


@dataclass
class BucketTimes:
    """When a bucket's collectives were started and waited for, in seconds of time.perf_counter.

    Attributes:
        launched: the first was started.
        waits: begin and end of each wait.
    """

    launched: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)


class InFlightBucket:
    """The collectives of one bucket, each started when the one before has ended.

    Args:
        bucket: the plan of the buffer.
        names: of the parameters in it, for messages.
        buffer: of ``bucket.numel`` elements.
        second_round: whether the bucket is sent again, with the gradients that were accumulated
            after it was sent.
    """

    def __init__(
        self, bucket: Bucket, names: list[str], buffer: torch.Tensor, second_round: bool = False
    ) -> None:
        self.bucket = bucket
        self._second_round = second_round
        self.names = names
        self.times = BucketTimes()
        self.collectives = 0
        self.present: set[int] = set()  # parameters with a gradient on this rank
        self._data = buffer
        self._scatter_input: torch.Tensor | None = None
        self._work: dist.Work | NarrowSum | None = None
        self._remaining = [*bucket.route.steps]

    def launch(self, locals_: Mapping[int, torch.Tensor]) -> None:
        """Packs the local gradients, by parameter, and starts the first collective."""
        self.times.launched = time.perf_counter()
        before, _ = self.bucket.route.divisors
        pack(self.bucket, locals_, self._data, before, first_round=not self._second_round)
        self.present = set(locals_)
        self._start()

    def advance(self) -> None:
        """Waits for the running collective and starts the next, where the bucket has several."""
        if len(self.bucket.route.steps) > 1 and self._remaining:
            self._next()

    def release_input(self) -> None:
        """Waits until the input of a reduce-scatter is sent, so that it can be filled again."""
        if self._scatter_input is not None:
            self._next()

    def wait(self) -> torch.Tensor:
        """Waits for all collectives and returns this rank's row, scaled.

        Raises:
            RuntimeError: a collective failed, or other ranks have not sent this bucket again.
        """
        while self._work is not None or self._remaining:
            self._next()
        _, after = self.bucket.route.divisors
        # The report keeps this object, which must not keep the memory of the gradients.
        row, self._data = self._data.view(-1), self._data.new_empty(0)
        if self._second_round and row[self.bucket.first_flag].item() > 0:
            raise RuntimeError(
                f"gradients of {', '.join(self.names)} were accumulated several times on this rank "
                f"and at most once on another: call finish() after each backward, or run all but "
                f"the last backward in no_sync()"
            )
        return row if after == 1.0 else row.div_(after)

    def _next(self) -> None:
        self._wait()
        self._start()

    def _start(self) -> None:
        while self._remaining and self._work is None:
            step = self._remaining.pop(0)
            if step.group.size > 1:
                send = self._reduce_scatter if step.is_scattered else self._all_reduce
                # A narrow all-reduce is two: of the terms, and of the sums.
                self.collectives += 1 if step.is_scattered or step.sent is None else 2
                self._work = self._with_names(partial(send, step.group.group, step.sent))

    def _reduce_scatter(
        self, group: dist.ProcessGroup, sent: torch.dtype | None
    ) -> dist.Work | NarrowSum:
        self._scatter_input = self._data  # is read until the work is done
        self._data = self._scatter_input.new_empty(self._scatter_input.numel() // group.size())
        if sent is not None:
            return narrow_reduce_scatter(self._data, self._scatter_input, sent, group)
        return _compat.reduce_scatter(self._data, self._scatter_input, dist.ReduceOp.SUM, group)

    def _all_reduce(
        self, group: dist.ProcessGroup, sent: torch.dtype | None
    ) -> dist.Work | NarrowSum:
        if sent is not None:
            return narrow_all_reduce(self._data.view(-1), sent, group)
        return _compat.all_reduce(self._data, dist.ReduceOp.SUM, group)

    def _wait(self) -> None:
        if self._work is None:
            return
        begin = time.perf_counter()
        work, self._work = self._work, None
        self._with_names(work.wait)
        self._scatter_input = None
        self.times.waits.append((begin, time.perf_counter()))

    def _waits_for_(self) -> str:
        """Describes what is waited for, for `fused_comm.diagnosis`."""
        return (
            f"fused-comm: bucket of {self.bucket.nbytes} bytes, {self.bucket.route}, with the "
            f"gradients of {', '.join(self.names)}"
        )

    def _with_names(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as error:
            raise RuntimeError(
                f"the reduction of a bucket of {self.bucket.nbytes} bytes failed, with the "
                f"gradients of {', '.join(self.names)}: {error}"
            ) from error


def pack(
    bucket: Bucket,
    locals_: Mapping[int, torch.Tensor],
    buffer: torch.Tensor,
    divisor: float = 1.0,
    first_round: bool = True,
) -> None:
    """Copies local gradients into their slots, divided and cast, and sets the flags.

    Args:
        bucket: the plan of the buffer.
        locals_: local gradients by parameter; the slots of missing ones become zero.
        buffer: of ``bucket.numel`` elements. The elements between slots, and those behind the
            smaller shards of uneven ones, are not written: they are reduced, and never read; they
            are zeros where numbers are sent in blocks.
        divisor: of every gradient; a power of two.
        first_round: whether this is a step's first round.
    """
    if bucket.route.has_blocks and bucket.route.rows > 1:
        buffer.zero_()  # other buckets have used it
    # Exact, and as a tensor applied in a third of the time of a Python number.
    inverse = torch.tensor(1.0 / divisor, device="cpu")
    targets, sources, in_place, absent = [], [], [], []
    for slot in bucket.slots:
        local = locals_.get(slot.item.index)
        for view_spec, slices in slot.parts:
            view = view_spec.of(buffer)
            if local is None:
                absent.append(view)
                continue
            part = local if slices is None else local[slices]
            if view.data_ptr() == part.data_ptr():
                in_place.append(view)
            elif divisor != 1.0 and part.dtype == view.dtype:
                torch.mul(part, inverse, out=view)
            else:
                targets.append(view)
                sources.append(part)
    if targets:
        torch._foreach_copy_(targets, sources)
    if divisor != 1.0:
        # Where all gradients are views of a buffer of one row, one call is enough.
        all_in_place = bucket.route.rows == 1 and len(in_place) == len(bucket.slots)
        for view in [buffer] if all_in_place else [*targets, *in_place]:
            view.mul_(inverse)
    if absent:
        torch._foreach_zero_(absent)
    rows, begin = buffer.view(bucket.route.rows, bucket.row), bucket.slots[0].flag
    flags = [float(slot.item.index in locals_) for slot in bucket.slots] + [float(first_round)]
    if all(flags):
        rows[:, begin : begin + len(flags)].fill_(1.0)
    else:
        rows[:, begin : begin + len(flags)].copy_(torch.tensor(flags))


def shard_view(slot: Slot, row: torch.Tensor) -> torch.Tensor:
    """Returns the view of a reduced row that is one gradient: this rank's shard, or all of it.

    Args:
        slot: of the gradient.
        row: as `InFlightBucket.wait` returns it.
    """
    return slot.own_view.of(row)


def any_rank_has(slot: Slot, row: torch.Tensor) -> bool:
    """Whether any rank had a gradient for this slot; synchronizes with the device."""
    return bool((row[slot.flag] > 0).item())
