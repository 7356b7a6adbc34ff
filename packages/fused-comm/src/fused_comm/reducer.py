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
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from fused_comm import _compat
from fused_comm.axes import plain_group
from fused_comm.bucket import Bucket, Entry, Route, plan_buckets
from fused_comm.flat_buffer import Allocate, FlatBuffer, allocate
from fused_comm.flight import Flight
from fused_comm.gradient import Home
from fused_comm.pack import own_piece, used
from fused_comm.parameters import agreed_group, gradients_of
from fused_comm.planner import Options, agree_on, entry_of
from fused_comm.reduction import Reduction, local_of
from fused_comm.report import BucketReport, Report
from fused_comm.step import Step, StepPlan

__all__ = ["GradReducer"]


class GradReducer:
    """Reduces the gradients of parameters to their parameters' placements.

    Keep it as long as it is to work. Call `finish()` after backward and before anything reads
    gradients; a second backward without it warns, once. A gradient that is Partial along mesh axes
    is summed over them: all-reduced where the parameter is replicated, reduce-scattered where it is
    sharded (veScale, section 6.3). Until then `.grad` may be None.

    Args:
        params: parameters, or pairs of name and parameter as `model.named_parameters()` gives
            them, in the same order on all ranks. Those that need no gradient are left alone.
        group: over which the gradients of plain tensors are reduced.
        bucket_mb: megabytes (2**20 bytes) of a bucket at most; a larger gradient has its own.
        reduce_dtype: of the sums, on every axis; by default that of the gradient.
        accumulate_dtype: in which gradients are added up while they are not synchronised, and
            reduced, if `reduce_dtype` says nothing else; by default the gradient's own.
        fuse_axes: several axes in one collective; False: one after another, for comparison.
        op: ``"sum"``, or ``"avg"``: the sum divided by the number of ranks. By default the mean
            for plain tensors, as DistributedDataParallel's, and the gradient's `Partial` for
            DTensors. Of `Partial("avg")` it is always the mean.
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
        op: Literal["sum", "avg"] | None = None,
        zero_copy: bool = False,
        allocate: Allocate = allocate,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        if op not in ("sum", "avg", None):
            raise ValueError(f"GradReducer: expected op='sum', 'avg' or None, got {op!r}")
        if zero_copy and accumulate_dtype is not None:
            raise ValueError(
                "GradReducer: with zero_copy gradients are added up in their buckets, in their own "
                "dtype: leave accumulate_dtype out"
            )
        if not bucket_mb > 0:
            raise ValueError(f"GradReducer: bucket_mb={bucket_mb} must be more than 0")
        self._gradients = gradients_of(params, accumulate_dtype)
        self._numbers = {id(one.param): number for number, one in enumerate(self._gradients)}
        self._options = Options(
            int(bucket_mb * 2**20), reduce_dtype, accumulate_dtype, fuse_axes, op,
            None if group is None else plain_group(group), timeout,
        )  # fmt: skip
        self._everyone = agreed_group(self._gradients, self._options.plain, timeout)
        self._zero_copy, self._allocate = zero_copy, allocate
        self._known: dict[int, Reduction] = {}  # of gradients that any rank has had, as they came
        self._plans: dict[frozenset[str | int], StepPlan] = {}
        # What shards are cut out of: two for each route.
        self._sent: dict[tuple[Route, int], FlatBuffer] = {}
        self._skipped: frozenset[str | int] = frozenset()
        self._synchronises = True
        self._step = Step()
        self._warned = False  # of a second backward without finish()
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
        step, self._step = self._step, Step()
        # What is planned goes first: on other ranks backward may have launched it.
        self._launch(plan, step, len(plan.buckets))
        self._learn(plan, step)
        self._launch(plan, step, len(plan.buckets))
        any_gradient = self._land(plan, step)
        self._last = step.flights
        if step.again:
            rest = Step(rest=True)
            self._launch(plan, rest, len(plan.buckets))
            self._land(plan, rest)
            self._last = [*step.flights, *rest.flights]
        # Those that need nothing are in no bucket.
        if not any_gradient and all(one.param.grad is None for one in self._gradients):
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

    def accumulate(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Takes a gradient that autograd did not put there itself, as if it had.

        For parameters of which forward uses something else, such as plain tensors that share their
        memory.

        Args:
            param: one of the reducer's.
            grad: placed as backward has made it; it is the parameter's from now on.

        Raises:
            ValueError: the parameter is not one of the reducer's, or needs no gradient.
        """
        number = self._numbers.get(id(param))
        if number is None or number not in self._hooked:
            raise ValueError(
                "GradReducer.accumulate: this parameter is none of those that were given and need "
                "a gradient"
            )
        self._before(number)
        if param.grad is None:
            param.grad = grad
        else:
            local_of(param.grad).add_(local_of(grad))
        self._after(number)

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

    def _plan(self) -> StepPlan:
        plan = self._plans.get(self._skipped)
        if plan is None:
            plan = self._plans[self._skipped] = StepPlan()
        return plan

    def _hook_new(self) -> None:
        for number, gradient in enumerate(self._gradients):
            if number in self._hooked or not gradient.param.requires_grad:
                continue
            self._hooked.add(number)
            before, after = _hooks(self, number)
            self._handles.append(gradient.param.register_hook(before))
            self._handles.append(gradient.param.register_post_accumulate_grad_hook(after))

    def _before(self, number: int) -> None:
        self._gradients[number].before_accumulation()

    def _after(self, number: int) -> None:
        if not self._synchronises:
            self._gradients[number].set_aside()
            return
        step, plan = self._step, self._plan()
        step.watch_backward()
        if number in step.order:
            step.again = True
            self._warned = self._warned or step.warn_if_ended()
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

    def _launch(self, plan: StepPlan, step: Step, until: int) -> None:
        """Launches buckets in their order, so that it is the same on all ranks."""
        for number in range(len(step.flights), until):
            if step.flights:
                step.flights[-1].advance()
            bucket = plan.buckets[number]
            if bucket.route.rows > 1:
                for flight in step.flights[:-1]:
                    flight.vacate()
            locals_ = {}
            for slot in bucket.slots:
                gradient = self._gradients[slot.entry.index]
                if not step.rest:
                    gradient.return_home()
                local = gradient.contribution(slot.entry.reduction, slot, bucket.route)
                if local is not None:
                    locals_[slot.entry.index] = local
            names = [self._gradients[slot.entry.index].name for slot in bucket.slots]
            flight = Flight(bucket, names, self._room(plan, number, step), step.rest)
            step.flights.append(flight)
            flight.launch(locals_)

    def _is_home(self, bucket: Bucket, step: Step) -> bool:
        """Whether gradients live in the buffer in which this bucket is sent in this step."""
        return self._zero_copy and not step.rest and not bucket.route.scattered

    def _room(self, plan: StepPlan, number: int, step: Step) -> torch.Tensor:
        bucket = plan.buckets[number]
        if bucket.route.rows == 1:
            return self._buffer(plan, number, step).data
        # Nothing stays in it: two for all buckets are enough, one filled and one on its way.
        key, size = (bucket.route, number % 2), plan.largest[bucket.route]
        held = self._sent.get(key)
        if held is None or held.data.numel() < size:
            if held is not None:
                held.release()
            held = self._allocate(size, bucket.route.dtype, bucket.route.device)
            self._sent[key] = held
        return held.data[: bucket.numel]

    def _buffer(self, plan: StepPlan, number: int, step: Step) -> FlatBuffer:
        bucket, held = plan.buckets[number], plan.held[number]
        if held and self._is_home(bucket, step):
            return held[0]
        if held and not _compat.is_viewed(held[-1].data):
            return held[-1]
        held.append(self._allocate(bucket.numel, bucket.route.dtype, bucket.route.device))
        return held[-1]

    def _land(self, plan: StepPlan, step: Step) -> bool:
        """Waits for all buckets and sets the gradients; whether there were any."""
        found = False
        for number, flight in enumerate(step.flights):
            row, bucket = flight.land(), plan.buckets[number]
            missing = False
            for slot in bucket.slots:
                gradient = self._gradients[slot.entry.index]
                exists = slot.entry.index in flight.given or used(slot, row)
                gradient.finish(own_piece(slot, row) if exists else None, slot.entry.reduction)
                if self._is_home(bucket, step):
                    keeps = bucket.route.keeps_finished
                    gradient.live_in(Home(own_piece(slot, row), slot.entry.reduction, keeps))
                elif exists:
                    gradient.live_in(None)
                found, missing = found or exists, missing or not exists
            if plan.held[number] and not missing and not (self._zero_copy and step.rest):
                # Nothing is left in the buffers before.
                self._release(plan.held[number], self._is_home(bucket, step))
        return found

    @staticmethod
    def _release(held: list[FlatBuffer], is_home: bool) -> None:
        """All but the one in which the gradients are now."""
        kept = held[0] if is_home else held[-1]
        for buffer in held:
            if buffer is not kept:
                buffer.release()
        held[:] = [kept]

    def _learn(self, plan: StepPlan, step: Step) -> None:
        """Plans gradients that have come for the first time, on any rank."""
        self._hook_new()
        self._check_settled()
        unknown = [
            number
            for number, gradient in enumerate(self._gradients)
            if number not in self._known and gradient.param.requires_grad
        ]
        if unknown:
            self._known |= agree_on(self._gradients, unknown, step.order, self._everyone)
        new, plan.planned = list(self._known.items())[plan.planned :], len(self._known)
        entries = []
        for number, reduction in new:
            rest = reduction.skipping(self._skipped)
            if rest.pending:
                entries.append(entry_of(number, rest, self._options))
                self._check_dtype(entries[-1])
        for bucket in plan_buckets(entries, self._options.bucket_bytes):
            for slot in bucket.slots:
                plan.bucket_of[slot.entry.index] = len(plan.buckets)
            plan.buckets.append(bucket)
            plan.largest[bucket.route] = max(bucket.numel, plan.largest.get(bucket.route, 0))
            plan.held.append([])

    def _check_settled(self) -> None:
        """Refuses to leave a gradient pending that needed nothing when it came first."""
        for number, known in self._known.items():
            if known.mesh is None or known.reduced or known.scattered:
                continue
            reduction = self._gradients[number].reduction()
            if reduction is not None and reduction.pending:
                raise ValueError(
                    f"gradient of {self._gradients[number].name!r}: it needed nothing, and now is "
                    f"{reduction.source}: make a new GradReducer for a model that has changed"
                )

    def _check_dtype(self, entry: Entry) -> None:
        if self._zero_copy and entry.route.dtype != entry.reduction.dtype:
            raise ValueError(
                f"GradReducer: zero_copy with reduce_dtype={entry.route.dtype}, but the gradient "
                f"of {self._gradients[entry.index].name!r} is {entry.reduction.dtype}: leave one "
                f"of them out"
            )


def _hooks(
    reducer: GradReducer, number: int
) -> tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]:
    """Of one parameter; they do not keep the reducer, which has the parameters.

    Autograd has hooks where the garbage collector does not look.
    """
    reference = weakref.ref(reducer)

    def before(_: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive._before(number)

    def after(_: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive._after(number)

    return before, after
