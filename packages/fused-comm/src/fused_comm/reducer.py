"""Gradients of whole models reduced in few collectives, while backward goes on.

Note: a *step* is what lies between two calls of `finish()`. In the first, gradients are only
looked at: what each needs is known when it has come, and the plan of the buckets is made in
`finish()`. From then on a bucket is *launched* as soon as backward has made its last gradient and
the buckets before it are launched, so all ranks launch them in one order; the rest is launched in
`finish()`, with zeros for what has no gradient here.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from fused_comm.axes import plain_group
from fused_comm.bucket import Bucket, plan_buckets
from fused_comm.flat_buffer import Allocate, FlatBuffer, allocate
from fused_comm.flight import Flight
from fused_comm.gradient import Home
from fused_comm.pack import own_piece, used
from fused_comm.parameters import agreed_group, gradients_of
from fused_comm.planner import Options, agree_on
from fused_comm.report import BucketReport, Report

__all__ = ["GradReducer"]


@dataclass
class _Plan:
    """Buckets for one choice of axes that stay pending."""

    buckets: list[Bucket] = field(default_factory=list)
    bucket_of: dict[int, int] = field(default_factory=dict)  # by parameter
    known: set[int] = field(default_factory=set)  # parameters whose gradients any rank has seen
    held: list[list[FlatBuffer]] = field(default_factory=list)  # per bucket, what gradients are in


@dataclass
class _Step:
    """What has happened since the last `finish()`."""

    order: dict[int, None] = field(default_factory=dict)  # parameters, as their gradients came
    missing: list[int] = field(default_factory=list)  # per bucket, gradients that have not come
    flights: list[Flight] = field(default_factory=list)  # of the buckets, in their order
    again: bool = False  # a gradient came a second time
    rest: bool = False  # of such a step, what came after its bucket was launched


class GradReducer:
    """Reduces the gradients of parameters to their parameters' placements.

    Call `finish()` after backward and before anything reads gradients. A gradient that is Partial
    along mesh axes is summed over them: all-reduced where the parameter is replicated,
    reduce-scattered where it is sharded (veScale, section 6.3). Until then `.grad` may be None.

    Args:
        params: parameters, or pairs of name and parameter as `model.named_parameters()` gives
            them, in the same order on all ranks. Those that need no gradient are left alone.
        group: over which the gradients of plain tensors are summed, as DDP does it.
        bucket_mb: megabytes (2**20 bytes) of a bucket at most; a larger gradient has its own.
        reduce_dtype: of the sums, on every axis; by default that of the gradient.
        accumulate_dtype: in which gradients are added up while they are not synchronised, and
            reduced, if `reduce_dtype` says nothing else; by default the gradient's own.
        fuse_axes: several axes in one collective; False: one after another, for comparison.
        op: ``"sum"``, or ``"avg"``: the sum divided by the number of ranks. Of
            `Partial("avg")` it is always the mean.
        zero_copy: gradients that are all-reduced live in their buckets, where backward adds them
            up; nothing is copied, and the buckets stay allocated. Sums have the gradients' dtype
            then. What is reduce-scattered is cut, and copied as ever.
        allocate: makes the buffers, `FlatBuffer`s; by default tensors of torch's allocator.
        timeout: of the groups that are made here; by default torch's.

    Raises:
        ValueError: parameters that differ between ranks, on every rank; no parameters; plain
            tensors without `group`.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor | tuple[str, torch.Tensor]],
        *,
        group: dist.ProcessGroup | None = None,
        bucket_mb: float = 25.0,
        reduce_dtype: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        fuse_axes: bool = True,
        op: Literal["sum", "avg"] = "sum",
        zero_copy: bool = False,
        allocate: Allocate = allocate,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        if op not in ("sum", "avg"):
            raise ValueError(f"GradReducer: op={op!r} must be 'sum' or 'avg'")
        if zero_copy and accumulate_dtype is not None:
            raise ValueError(
                "GradReducer: with zero_copy gradients are added up in their buckets, in their own "
                "dtype: leave accumulate_dtype out"
            )
        if not bucket_mb > 0:
            raise ValueError(f"GradReducer: bucket_mb={bucket_mb} must be more than 0")
        self._gradients = gradients_of(params, accumulate_dtype)
        self._options = Options(
            int(bucket_mb * 2**20), reduce_dtype, accumulate_dtype, fuse_axes, op == "avg",
            None if group is None else plain_group(group), timeout,
        )  # fmt: skip
        self._everyone = agreed_group(self._gradients, self._options.plain, timeout)
        self._zero_copy, self._allocate = zero_copy, allocate
        self._plans: dict[frozenset[str | int], _Plan] = {}
        self._skipped: frozenset[str | int] = frozenset()
        self._synchronises = True
        self._step = _Step()
        self._last: list[Flight] = []
        self._hooked: set[int] = set()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hook_new()

    def finish(self) -> None:
        """Reduces what is left, waits for everything, and sets the gradients.

        Does nothing while gradients are not synchronised.

        Raises:
            RuntimeError: no rank has a gradient: backward has not run; or a collective failed.
            ValueError: gradients differ between ranks, or from those before; see `reduction_of`.
        """
        if not self._synchronises:
            return
        plan = self._plan()
        self._learn(plan)
        step, self._step = self._step, _Step()
        self._launch(plan, step, len(plan.buckets))
        any_gradient = self._land(plan, step)
        self._last = step.flights
        if step.again:
            rest = _Step(rest=True)
            self._launch(plan, rest, len(plan.buckets))
            self._land(plan, rest)
            self._last = [*step.flights, *rest.flights]
        if not any_gradient:
            raise RuntimeError(
                "GradReducer.finish(): no rank has a gradient; call it once after each backward"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients are accumulated and nothing is sent; as DDP's."""
        before = self._synchronises
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._synchronises = before

    def set_requires_gradient_sync(
        self, requires: bool, *, axes: Sequence[str | int] | None = None
    ) -> None:
        """Whether backward reduces gradients, or leaves them to be accumulated.

        Args:
            requires: False until the last of several backwards.
            axes: mesh axes, by name or number, to which it applies; by default all. Along those
                that are left out gradients stay Partial, as with HSDP's deferred all-reduce.
        """
        if axes is None:
            self._synchronises = requires
        elif requires:
            self._skipped -= frozenset(axes)
        else:
            self._skipped |= frozenset(axes)

    def report(self) -> Report:
        """What the last step sent: a table as text, and a picture of its times."""
        start = min((flight.times.launched for flight in self._last), default=0.0)
        return Report(
            tuple(
                BucketReport(
                    tuple(flight.names),
                    str(flight.bucket.route),
                    flight.bucket.nbytes,
                    flight.collectives,
                    flight.times.launched - start,
                    tuple((begin - start, end - start) for begin, end in flight.times.waits),
                )
                for flight in self._last
            )
        )

    def remove(self) -> None:
        """Takes its hooks from the parameters; it is of no use afterwards."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _plan(self) -> _Plan:
        return self._plans.setdefault(self._skipped, _Plan())

    def _hook_new(self) -> None:
        for number, gradient in enumerate(self._gradients):
            if number in self._hooked or not gradient.param.requires_grad:
                continue
            self._hooked.add(number)
            self._handles.append(
                gradient.param.register_hook(lambda _, number=number: self._before(number))
            )
            self._handles.append(
                gradient.param.register_post_accumulate_grad_hook(
                    lambda _, number=number: self._after(number)
                )
            )

    def _before(self, number: int) -> None:
        self._gradients[number].before_accumulation()

    def _after(self, number: int) -> None:
        if not self._synchronises:
            self._gradients[number].set_aside()
            return
        step, plan = self._step, self._plan()
        if number in step.order:
            step.again = True
            return
        step.order[number] = None
        if not plan.buckets:
            return
        if not step.missing:
            step.missing = [len(bucket.slots) for bucket in plan.buckets]
        if number in plan.bucket_of:
            step.missing[plan.bucket_of[number]] -= 1
        complete = len(step.flights)
        while complete < len(plan.buckets) and step.missing[complete] == 0:
            complete += 1
        self._launch(plan, step, complete)

    def _launch(self, plan: _Plan, step: _Step, until: int) -> None:
        """Launches buckets in their order, so that it is the same on all ranks."""
        for number in range(len(step.flights), until):
            if step.flights:
                step.flights[-1].advance()
            bucket = plan.buckets[number]
            locals_ = {}
            for slot in bucket.slots:
                gradient = self._gradients[slot.entry.index]
                local = gradient.contribution(slot.entry.reduction, slot, bucket.route)
                if local is not None:
                    locals_[slot.entry.index] = local
            names = [self._gradients[slot.entry.index].name for slot in bucket.slots]
            flight = Flight(bucket, names, self._buffer(plan, number, step))
            step.flights.append(flight)
            flight.launch(locals_)

    def _buffer(self, plan: _Plan, number: int, step: _Step) -> torch.Tensor:
        route, held = plan.buckets[number].route, plan.held[number]
        if not (self._zero_copy and held and not step.rest and not route.scattered):
            held.append(self._allocate(plan.buckets[number].numel, route.dtype, route.device))
            return held[-1].data
        return held[0].data

    def _land(self, plan: _Plan, step: _Step) -> bool:
        """Waits for all buckets and sets the gradients; whether there were any."""
        found = False
        for number, flight in enumerate(step.flights):
            row, bucket = flight.land(), plan.buckets[number]
            missing = False
            for slot in bucket.slots:
                gradient = self._gradients[slot.entry.index]
                exists = slot.entry.index in flight.given or used(slot, row)
                gradient.finish(own_piece(slot, row) if exists else None, slot.entry.reduction)
                if self._zero_copy and not step.rest and not bucket.route.scattered:
                    keeps = bucket.route.keeps_finished
                    gradient.live_in(Home(own_piece(slot, row), slot.entry.reduction, keeps))
                found, missing = found or exists, missing or not exists
            if not missing and not (self._zero_copy and step.rest):
                # Nothing is left in other buffers.
                self._release(plan.held[number], keep=0 if self._zero_copy else -1)
        return found

    @staticmethod
    def _release(held: list[FlatBuffer], keep: int) -> None:
        kept = held[keep]
        for buffer in held:
            if buffer is not kept:
                buffer.release()
        held[:] = [kept]

    def _learn(self, plan: _Plan) -> None:
        """Plans gradients that have come for the first time, on any rank."""
        self._hook_new()
        unknown = [
            number
            for number, gradient in enumerate(self._gradients)
            if number not in plan.known and gradient.param.requires_grad
        ]
        if not unknown:
            return
        skipped = sorted(self._skipped, key=str)
        agreed = agree_on(
            self._gradients, unknown, self._step.order, skipped, self._options, self._everyone
        )
        plan.known.update(agreed.seen)
        for entry in agreed.entries:
            if self._zero_copy and entry.route.dtype != entry.reduction.dtype:
                raise ValueError(
                    f"GradReducer: zero_copy with reduce_dtype={entry.route.dtype}, but the "
                    f"gradient of {self._gradients[entry.index].name!r} is "
                    f"{entry.reduction.dtype}: leave one of them out"
                )
        for bucket in plan_buckets(agreed.entries, self._options.bucket_bytes):
            for slot in bucket.slots:
                plan.bucket_of[slot.entry.index] = len(plan.buckets)
            plan.buckets.append(bucket)
            plan.held.append([])
