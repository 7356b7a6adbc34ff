"""Records one step by a dispatch mode.

The mode sees each operator before DTensor does. It passes the operator to DTensor and stays active,
so it sees the collectives below as well, functional ones and those of c10d.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from plan_api.inspect.collectives import (
    axis_label,
    collective_name,
    get_process_group,
    get_work,
    payload_bytes,
    real_tensors,
)
from plan_api.inspect.sites import Origin, SiteTracker
from plan_api.inspect.track.events import CallEvent, CollectiveEvent, OperatorEvent, StepPhase
from plan_api.inspect.track.record import Record
from plan_api.installation import installed
from plan_api.plan import Plan
from plan_api.runtime.attribution import set_observer
from plan_api.spec.placements import format_placement

__all__ = ["track"]

_active = threading.Lock()
_SUBCLASSES = (DTensor, AsyncCollectiveTensor)  # they dispatch the operators that are recorded
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_NO_OPERATORS = ("profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd")


@contextmanager
def track(model: nn.Module) -> Iterator[Record]:
    """Records the operators and collectives of a step, in the order in which they run.

    Inside of the block DTensor's Python dispatch runs in place of dtensor-rules', which is
    disabled under dispatch modes, and the step takes several times as long: order, bytes and
    placements are those of any step, times are for comparison with one another. Outside of it
    nothing is slower.

    Args:
        model: whose modules are the sites; parallelized, for lines of the plan.

    Yields:
        the record, which can be read after the block, also if it raised.

    Raises:
        RuntimeError: within another `track` of this process.
    """
    if not _active.acquire(blocking=False):
        raise RuntimeError(
            "track: expected no other track() in this process, as each would miss what the other "
            "does; end that block first"
        )
    with ExitStack() as stack:
        stack.callback(_active.release)
        recorder = _TrackMode(model)
        record = Record(type(model).__name__)
        stack.callback(lambda: recorder.complete(record))
        recorder.register_hooks(model, stack)
        set_observer(recorder.sites.watch)
        stack.callback(set_observer, None)
        stack.enter_context(recorder)
        yield record


class _TrackMode(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sites = SiteTracker(model)
        self._plan = _plan_of(model)
        self._mesh = _mesh_of(model)
        self._began = perf_counter()
        self._events: list[OperatorEvent | CollectiveEvent] = []
        self._calls: list[CallEvent] = []
        self._pending: dict[int, int] = {}  # data pointer of a result not yet waited for: its event
        self._ends: dict[int, float] = {}  # when collectives ended, by event
        self._axes: dict[str, str] = {}  # by name of a group
        self._optimizing = False
        self._operator = ""  # the DTensor operator that runs
        self._redispatches = False  # whether the next dispatch passes it to DTensor

    def register_hooks(self, model: nn.Module, stack: ExitStack) -> None:
        """Registers hooks around those of the plan, on every module; the stack removes them."""
        for path, module in model.named_modules():  # each once, by its first name
            hooks = self._module_hooks(path)
            for handle in (
                module.register_forward_pre_hook(hooks.enter, prepend=True),
                module.register_forward_hook(hooks.leave, always_call=True),
            ):
                stack.callback(handle.remove)
        for handle in (
            register_optimizer_step_pre_hook(lambda *_: self._set_optimizing(True)),
            register_optimizer_step_post_hook(lambda *_: self._set_optimizing(False)),
        ):
            stack.callback(handle.remove)

    def complete(self, record: Record) -> None:
        """Fills a record with the events."""
        events = [
            replace(event, duration=self._ends[at] - event.start) if at in self._ends else event
            for at, event in enumerate(self._events)
        ]
        # Collectives are appended before the operator that caused them, which began before them.
        events.sort(key=lambda event: event.start)
        record._set(tuple(events), tuple(sorted(self._calls, key=lambda call: call.start)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._redispatches:
            self._redispatches = False
            return NotImplemented
        if any(issubclass(one, _SUBCLASSES) for one in types):
            if self._operator or not any(issubclass(one, DTensor) for one in types):
                return NotImplemented
            return self._run_operator(func, args, kwargs)
        if func is _WAIT:
            return self._wait(func, args)
        collective = collective_name(func)
        if (collective and real_tensors(args)) or collective == "barrier":
            return self._run_collective(collective, func, args, kwargs)
        if self._operator or func.namespace in _NO_OPERATORS or self._is_internal():
            return func(*args, **kwargs)
        return self._run_plain(func, args, kwargs)

    def _run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = _format_placed((args, kwargs))
        self._operator = _operator_name(func)
        self._redispatches = True
        start = self._time()
        try:
            with self:
                result = func(*args, **kwargs)
        finally:
            self._operator, self._redispatches = "", False
        self._add_operator(func, before, result, start)
        return result

    def _run_plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = _format_placed((args, kwargs))
        start = self._time()
        result = func(*args, **kwargs)
        self._add_operator(func, before, result, start)
        return result

    def _add_operator(self, func: Any, before: str, result: Any, start: float) -> None:
        origin, end = self.sites.current(), self._time()
        self._events.append(
            OperatorEvent(
                _operator_name(func), origin.site, self._phase(), before, _format_placed(result),
                _local_bytes(result), start, end - start,
            )
        )  # fmt: skip

    def _run_collective(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        at, start = len(self._events), self._time()
        result = func(*args, **kwargs)
        duration = self._time() - start
        group = get_process_group(func, args)
        axis = "" if group is None else self._axis(group)
        origin = self.sites.current()
        why = self._why(origin, axis)
        cause = origin.cause
        # A collective for many parameters at once belongs to none of their modules.
        site = None if why.text == "gradients" else origin.site
        self._events.append(
            CollectiveEvent(
                name, site, self._phase(), axis, None if group is None else group.size(),
                _format(cause.before) if cause else "", _format(cause.after) if cause else "",
                payload_bytes(args, result), why.text, why.line, start, duration,
            )
        )  # fmt: skip
        work = get_work(result)
        if work is not None:
            self._record_end(work, at)
        for tensor in real_tensors(result) if work is None else ():
            self._pending[tensor.data_ptr()] = at
        return result

    def _wait(self, func: Any, args: tuple[Any, ...]) -> Any:
        result = func(*args)
        for tensor in real_tensors(args):
            at = self._pending.pop(tensor.data_ptr(), None)
            if at is not None:
                self._ends[at] = self._time()
        return result

    def _record_end(self, work: dist.Work, at: int) -> None:
        def ended(_: object) -> None:
            self._ends[at] = self._time()

        with suppress(RuntimeError):  # not every kind of work has a future
            work.get_future().add_done_callback(ended)

    def _why(self, origin: Origin, axis: str) -> _Reason:
        cause = origin.cause
        if cause is None:
            # Hooks on parameters, which send gradients as soon as these are accumulated.
            return _Reason(self._operator or ("gradients" if origin.param else ""))
        if cause.step is None:
            return _Reason(f"gradient of {origin.param}" if origin.param else "gradients")
        if not cause.step.entries:
            return _Reason("redistribute", f"{cause.step.tensor}:{cause.step.index}")
        if self._plan is None:
            return _Reason("plan")
        entries = [self._plan.entries[number] for number in cause.step.entries]
        own = [entry for entry in entries if set(entry.axes) & set(axis.split("+"))] or entries
        return _Reason("plan", ", ".join(dict.fromkeys(one.line for one in own)))

    def _is_internal(self) -> bool:
        """Whether what runs is part of a redistribution or reduction, on local tensors."""
        origin = self.sites.current()
        return origin.cause is not None or bool(origin.param)

    def _axis(self, group: dist.ProcessGroup) -> str:
        name = group.group_name
        if name not in self._axes:
            self._axes[name] = axis_label(group, self._mesh)
        return self._axes[name]

    def _phase(self) -> StepPhase:
        if torch._C._current_graph_task_id() != -1:
            return StepPhase.BACKWARD
        return StepPhase.OPTIMIZER if self._optimizing else StepPhase.FORWARD

    def _set_optimizing(self, optimizing: bool) -> None:
        self._optimizing = optimizing

    def _time(self) -> float:
        return 1e6 * (perf_counter() - self._began)

    def _module_hooks(self, path: str) -> _CallHooks:
        """Returns hooks for the start and the end of a module's forward."""
        running: list[_RunningCall] = []

        def enter(*_: object) -> None:
            running.append(_RunningCall(self.sites.depth, self._phase(), self._time()))
            self.sites.enter(path)

        def leave(*_: object) -> None:
            if running:  # not if a hook before `enter` raised
                one = running.pop()
                self.sites.leave(one.depth)
                self._calls.append(CallEvent(path, one.phase, one.start, self._time() - one.start))

        return _CallHooks(enter, leave)


@dataclass(frozen=True)
class _RunningCall:
    depth: int
    phase: StepPhase
    start: float


@dataclass(frozen=True)
class _CallHooks:
    enter: Callable[..., None]
    leave: Callable[..., None]


@dataclass(frozen=True)
class _Reason:
    text: str
    line: str = ""


def _plan_of(model: nn.Module) -> Plan | None:
    try:
        return installed(model).plan
    except ValueError:  # not parallelized: its step is recorded without lines of a plan
        return None


def _mesh_of(model: nn.Module) -> DeviceMesh | None:
    meshes = (param.device_mesh for param in model.parameters() if isinstance(param, DTensor))
    return next(meshes, None)


def _operator_name(func: torch._ops.OpOverload) -> str:
    """Returns a name as in ``aten.addmm``, without the overload."""
    return str(func._schema.name).replace("::", ".")


def _format(placements: Sequence[Placement]) -> str:
    """Formats a placement per axis, as in ``S(0),R``."""
    return ",".join(map(format_placement, placements))


def _format_placed(value: Any) -> str:
    """Formats the placements of all tensors in a value; equal neighbours are counted."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    texts = [
        _format(tensor.placements) if isinstance(tensor, DTensor) else "local" for tensor in tensors
    ]
    runs = [(text, len(list(same))) for text, same in itertools.groupby(texts)]
    return " ".join(text if number == 1 else f"{number}x {text}" for text, number in runs)


def _local_bytes(value: Any) -> int:
    """Returns the bytes of all tensors in a value on this rank."""
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    locals_ = (
        tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors
    )
    return sum(one.numel() * one.element_size() for one in locals_)
