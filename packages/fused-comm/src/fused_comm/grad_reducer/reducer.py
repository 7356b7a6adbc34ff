"""Reduces the gradients of whole models in few collectives, during backward.

Note: a *step* is the time between two calls of `finish()`. In the first step gradients are only
inspected: what each needs is known when it is computed, and `finish()` plans the buckets. From then
on a bucket is *launched* as soon as backward has computed its last gradient and the buckets before
it are launched, so all ranks launch them in one order. `finish()` launches the remaining buckets,
with zeros for gradients that this rank does not have.

    autograd's hooks    _before_accumulation -> accumulation -> _after_accumulation -> _launch
    finish()            _launch -> _plan_new_gradients -> _launch -> _wait
                        (-> _launch -> _wait, where a gradient was accumulated twice)
"""

from __future__ import annotations

import contextlib
import datetime
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from fused_comm.bucket import BucketItem, plan_buckets
from fused_comm.grad_reducer.buffers import Allocate, BucketPlan, BufferPool, allocate
from fused_comm.grad_reducer.gradient import BucketView
from fused_comm.grad_reducer.plan import (
    ReducerOptions,
    agree_on_group,
    agree_on_reductions,
    bucket_item,
    gradient_states,
)
from fused_comm.grad_reducer.report import BucketReport, Report
from fused_comm.in_flight_bucket import InFlightBucket, any_rank_has, shard_view
from fused_comm.narrow_sums import SendDtype, checked_send_dtype
from fused_comm.process_groups import flat_group_of
from fused_comm.reduction import Reduction
from fused_comm.sharding import local_tensor

__all__ = ["GradReducer"]


class GradReducer:
    """Reduces the gradients of parameters to their parameters' placements.

    Keep it for as long as it is used. Call `finish()` after backward and before anything reads
    gradients; a second backward without it warns, once. A gradient that is Partial along mesh axes
    is summed over them: all-reduced where the parameter is replicated, reduce-scattered where it is
    sharded (veScale, section 6.3). Until `finish()`, `.grad` may be None.

    Args:
        params: parameters, or pairs of name and parameter as `model.named_parameters()` returns
            them, in the same order on all ranks. Parameters that require no gradient are skipped.
        group: over which the gradients of plain tensors are reduced.
        bucket_mb: the most megabytes (2**20 bytes) of a bucket; a larger gradient has a bucket for
            itself.
        reduce_dtype: of the sums, on every axis; by default that of the gradient.
        accumulate_dtype: in which gradients are accumulated while they are not synchronized, and
            reduced, unless `reduce_dtype` is given; by default the gradient's.
        fuse_axes: several axes in one collective; False: one after another, for comparison.
        op: ``"sum"``, or ``"avg"``: the sum divided by the number of ranks. By default the mean
            for plain tensors, as DistributedDataParallel's, and the gradient's `Partial` for
            DTensors. For `Partial("avg")` it is always the mean.
        zero_copy: gradients that are all-reduced are views of their buckets, where backward
            accumulates them; nothing is copied, and the buckets stay allocated. Sums have the
            gradients' dtype then. Gradients that are reduce-scattered are copied as without it.
        allocate: makes the buffers, `FlatBuffer`s; by default tensors of torch's allocator.
        timeout: of the groups that are made here; by default torch's.
        send_dtype: in which terms are sent, where that is narrower than that of the sums:
            ``torch.bfloat16``, or a float8 dtype with a scale for each 128 elements. A mapping has
            one for some axes, by name or number, such as those between hosts. Each term is rounded
            once, and added in the dtype of the sums, in the order of the ranks; sums that are
            all-reduced are rounded once more.

    Raises:
        ValueError: parameters that differ between ranks, on every rank; no parameters; plain
            tensors without `group`; arguments that exclude each other.
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
        send_dtype: SendDtype = None,
    ) -> None:
        if op not in ("sum", "avg", None):
            raise ValueError(f"GradReducer: expected op='sum', 'avg' or None, got {op!r}")
        if zero_copy and accumulate_dtype is not None:
            raise ValueError(
                "GradReducer: expected zero_copy or accumulate_dtype, got both: with zero_copy "
                "gradients are accumulated in their buckets, in their own dtype; leave "
                "accumulate_dtype out"
            )
        if not bucket_mb > 0:
            raise ValueError(f"GradReducer: expected bucket_mb > 0, got {bucket_mb}")
        self._gradients = gradient_states(params, accumulate_dtype)
        self._numbers = {
            id(gradient.param): number for number, gradient in enumerate(self._gradients)
        }
        self._options = ReducerOptions(
            int(bucket_mb * 2**20), reduce_dtype, accumulate_dtype, fuse_axes, op,
            None if group is None else flat_group_of(group), timeout,
            checked_send_dtype("GradReducer", send_dtype),
        )  # fmt: skip
        self._everyone = agree_on_group(self._gradients, self._options)
        self._zero_copy, self._buffers = zero_copy, BufferPool(allocate, zero_copy)
        # Of gradients that any rank has had, in the order in which they are computed.
        self._known: dict[int, Reduction] = {}
        self._plans: dict[frozenset[str | int], BucketPlan] = {}
        self._deferred: frozenset[str | int] = frozenset()
        self._synchronizes = True
        self._step = _Step()
        self._warned = False  # of a second backward without finish()
        self._last: list[InFlightBucket] = []
        self._hooked: set[int] = set()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._register_hooks()

    def finish(self) -> None:
        """Launches the remaining buckets, waits for all of them, and assigns the gradients.

        Does nothing while gradients are not synchronized.

        Raises:
            RuntimeError: no rank has a gradient: backward has not run; or a collective failed.
            ValueError: gradients differ between ranks, or from those of earlier steps; see
                `reduction_of`.
        """
        if not self._synchronizes:
            return
        plan = self._plan()
        step, self._step = self._step, _Step()
        # Planned buckets first: on other ranks backward may have launched them.
        self._launch(plan, step, len(plan.buckets))
        self._plan_new_gradients(plan, step)
        self._launch(plan, step, len(plan.buckets))
        any_gradient = self._wait(plan, step)
        self._last = step.in_flight
        if step.repeated:
            second = _Step(second_round=True)
            self._launch(plan, second, len(plan.buckets))
            self._wait(plan, second)
            self._last = [*step.in_flight, *second.in_flight]
        # Gradients that need no reduction are in no bucket.
        if not any_gradient and all(gradient.param.grad is None for gradient in self._gradients):
            raise RuntimeError(
                "GradReducer.finish(): no rank has a gradient; call it once after each backward"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients without communication while the context is entered, as DDP's."""
        before = self._synchronizes
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._synchronizes = before

    def set_requires_gradient_sync(
        self, requires: bool, *, axes: Sequence[str | int] | None = None
    ) -> None:
        """Sets whether gradients are reduced, or accumulated without communication.

        Args:
            requires: False until the last of several backwards.
            axes: mesh axes, by name or number, to which it applies; by default all. Along axes that
                are not synchronized gradients stay Partial, as with HSDP's deferred all-reduce.
        """
        if axes is None:
            self._synchronizes = requires
        elif requires:
            self._deferred -= frozenset(axes)
        else:
            self._deferred |= frozenset(axes)

    def accumulate(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Accumulates a gradient that autograd has not accumulated itself, as if it had.

        For parameters whose forward uses other tensors, such as plain tensors that share their
        memory.

        Args:
            param: one of the reducer's.
            grad: with the placements of backward; its memory belongs to the parameter from now on.

        Raises:
            ValueError: the parameter is not one of the reducer's, or needs no gradient.
        """
        number = self._numbers.get(id(param))
        if number is None or number not in self._hooked:
            raise ValueError(
                "GradReducer.accumulate: expected a parameter of this reducer that requires a "
                "gradient, got another tensor; pass it to the constructor"
            )
        self._before_accumulation(number)
        if param.grad is None:
            param.grad = grad
        else:
            local_tensor(param.grad).add_(local_tensor(grad))
        self._after_accumulation(number)

    def report(self) -> Report:
        """Returns what the last step sent: a table as text, and a timeline."""
        start = min((bucket.times.launched for bucket in self._last), default=0.0)
        return Report(
            tuple(
                BucketReport(
                    tuple(in_flight.names),
                    str(in_flight.bucket.route),
                    in_flight.bucket.nbytes,
                    in_flight.collectives,
                    in_flight.times.launched - start,
                    tuple((begin - start, end - start) for begin, end in in_flight.times.waits),
                )
                for in_flight in self._last
            )
        )

    def remove(self) -> None:
        """Removes the hooks from the parameters; the reducer does nothing afterwards."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _plan(self) -> BucketPlan:
        plan = self._plans.get(self._deferred)
        if plan is None:
            plan = self._plans[self._deferred] = BucketPlan()
        return plan

    def _register_hooks(self) -> None:
        """Registers hooks of parameters that require a gradient, also of new ones."""
        for number, gradient in enumerate(self._gradients):
            if number in self._hooked or not gradient.param.requires_grad:
                continue
            self._hooked.add(number)
            before, after = _hooks(self, number)
            self._handles.append(gradient.param.register_hook(before))
            self._handles.append(gradient.param.register_post_accumulate_grad_hook(after))

    def _before_accumulation(self, number: int) -> None:
        self._gradients[number].before_accumulation()

    def _after_accumulation(self, number: int) -> None:
        if not self._synchronizes:
            self._gradients[number].accumulate()
            return
        step, plan = self._step, self._plan()
        step.watch_backward()
        if number in step.order:
            step.repeated = True
            self._warned = self._warned or step.warn_if_ended()
            return
        step.order[number] = None
        if not plan.buckets:
            return
        if not step.missing:
            step.missing = [len(bucket.slots) for bucket in plan.buckets]
        if number in plan.bucket_of:
            step.missing[plan.bucket_of[number]] -= 1
        complete = len(step.in_flight)
        while complete < len(plan.buckets) and step.missing[complete] == 0:
            complete += 1
        self._launch(plan, step, complete)

    def _launch(self, plan: BucketPlan, step: _Step, until: int) -> None:
        """Launches buckets in their order, so that it is the same on all ranks."""
        for number in range(len(step.in_flight), until):
            if step.in_flight:
                step.in_flight[-1].advance()
            bucket = plan.buckets[number]
            if bucket.route.rows > 1:
                for earlier in step.in_flight[:-1]:
                    earlier.release_input()
            locals_ = {}
            for slot in bucket.slots:
                gradient = self._gradients[slot.item.index]
                if not step.second_round:
                    gradient.restore_finished()
                local = gradient.contribution(slot.item.reduction, slot, bucket.route)
                if local is not None:
                    locals_[slot.item.index] = local
            names = [self._gradients[slot.item.index].name for slot in bucket.slots]
            buffer = self._buffers.buffer_of(plan, number, step.second_round)
            in_flight = InFlightBucket(bucket, names, buffer, step.second_round)
            step.in_flight.append(in_flight)
            in_flight.launch(locals_)

    def _wait(self, plan: BucketPlan, step: _Step) -> bool:
        """Waits for all buckets and assigns the gradients; whether there were any."""
        found = False
        for number, in_flight in enumerate(step.in_flight):
            row, bucket = in_flight.wait(), plan.buckets[number]
            in_buffer = self._buffers.accumulates_in(bucket, step.second_round)
            missing = False
            for slot in bucket.slots:
                gradient = self._gradients[slot.item.index]
                exists = slot.item.index in in_flight.present or any_rank_has(slot, row)
                gradient.assign(shard_view(slot, row) if exists else None, slot.item.reduction)
                if in_buffer:
                    owns = bucket.route.owns_finished
                    gradient.attach(BucketView(shard_view(slot, row), slot.item.reduction, owns))
                elif exists:
                    gradient.attach(None)
                found, missing = found or exists, missing or not exists
            if not missing:  # so no gradient is in an older buffer
                self._buffers.release_unused(plan, number, step.second_round)
        return found

    def _plan_new_gradients(self, plan: BucketPlan, step: _Step) -> None:
        """Plans the gradients that any rank has had for the first time."""
        self._register_hooks()
        self._check_settled()
        unknown = [
            number
            for number, gradient in enumerate(self._gradients)
            if number not in self._known and gradient.param.requires_grad
        ]
        if unknown:
            self._known |= agree_on_reductions(self._gradients, unknown, step.order, self._everyone)
        new, plan.planned = list(self._known.items())[plan.planned :], len(self._known)
        items = []
        for number, known in new:
            reduction = known.without(self._deferred)
            if reduction.pending:
                items.append(bucket_item(number, reduction, self._options))
                self._check_dtype(items[-1])
        for bucket in plan_buckets(items, self._options.bucket_bytes):
            plan.add(bucket)

    def _check_settled(self) -> None:
        """Refuses a pending gradient of a parameter whose first gradient needed no reduction."""
        for number, known in self._known.items():
            if known.mesh is None or known.reduced or known.scattered:
                continue
            reduction = self._gradients[number].reduction()
            if reduction is not None and reduction.pending:
                raise ValueError(
                    f"gradient of {self._gradients[number].name!r}: expected {known.source}, which "
                    f"needed no reduction in earlier steps, got {reduction.source}: make a new "
                    f"GradReducer for a model that has changed"
                )

    def _check_dtype(self, item: BucketItem) -> None:
        if self._zero_copy and item.route.dtype != item.reduction.dtype:
            raise ValueError(
                f"GradReducer: zero_copy with reduce_dtype={item.route.dtype}, but the gradient "
                f"of {self._gradients[item.index].name!r} is {item.reduction.dtype}: leave one "
                f"of them out"
            )


@dataclass
class _Step:
    """What has happened since the last `finish()`.

    Attributes:
        order: the parameters, in the order in which their gradients were computed.
        backward: autograd's number of the backward that is watched.
        ended: whether a backward that computed a gradient of this step is over.
        missing: per bucket, how many of its gradients are not computed yet.
        in_flight: the launched buckets, in their order.
        repeated: whether a gradient was accumulated a second time.
        second_round: whether this is the second round of such a step, with the gradients that were
            accumulated after their bucket was launched.
    """

    order: dict[int, None] = field(default_factory=dict)
    backward: int = -1
    ended: bool = False
    missing: list[int] = field(default_factory=list)
    in_flight: list[InFlightBucket] = field(default_factory=list)
    repeated: bool = False
    second_round: bool = False

    def watch_backward(self) -> None:
        """Registers a callback for the end of the backward that runs now, if one does."""
        current = torch._C._current_graph_task_id()
        if current not in (-1, self.backward):
            self.backward = current
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def warn_if_ended(self) -> bool:
        """Warns of a second backward if the step's first is over; whether it did."""
        if self.ended:
            warnings.warn(
                "GradReducer: a second backward began without finish() after the first, and its "
                "gradients need collectives of their own; call finish() after each backward, or "
                "run all but the last backward of a step within no_sync()",
                stacklevel=2,
            )
        return self.ended

    def _backward_ended(self) -> None:
        # A callback within a node is of reentrant checkpointing, whose outer backward continues.
        if torch._C._current_autograd_node() is None:
            self.ended = True


def _hooks(
    reducer: GradReducer, number: int
) -> tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]:
    """Makes the hooks of one parameter, with a weak reference to the reducer.

    The garbage collector does not see autograd's references to hooks, and the reducer refers to its
    parameters.
    """
    reference = weakref.ref(reducer)

    def before(_: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive._before_accumulation(number)

    def after(_: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive._after_accumulation(number)

    return before, after
