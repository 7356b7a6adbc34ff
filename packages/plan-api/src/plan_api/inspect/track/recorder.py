"""Watches one step.

A dispatch mode sees each operator before DTensor does. It lets DTensor have it, and stays active
meanwhile: then it sees the collectives below, functional ones and c10d's own alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
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
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from plan_api.api import installed
from plan_api.inspect.track.collective import (
    axis_of,
    bytes_of,
    group_of,
    name_of,
    tensors_of,
    work_of,
)
from plan_api.inspect.track.describe import local_bytes, operator_name, placed, shorts
from plan_api.inspect.track.events import Call, Collective, Operator, Phase
from plan_api.inspect.track.record import Record
from plan_api.inspect.track.sites import Origin, Sites
from plan_api.plan import Plan
from plan_api.runtime.attribution import set_observer

__all__ = ["track"]

_active = threading.Lock()
_LATER = (DTensor, AsyncCollectiveTensor)  # they make of an operator what is recorded
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_NO_OPERATORS = ("profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd")


@contextmanager
def track(model: nn.Module) -> Iterator[Record]:
    """Records the operators and collectives of a step, in the order in which they run.

    While it does, DTensor's own Python dispatch runs in place of dtensor-rules', which makes way
    for dispatch modes, and the step takes several times as long: orders, bytes and placements are
    those of any step, times are for comparison with one another. Outside of it nothing is slower.

    Args:
        model: whose modules are the sites; one that `parallelize` has had, for lines of the plan.

    Yields:
        the record, which can be read when the block has ended, also by an exception.

    Raises:
        RuntimeError: within another `track` of this process.
    """
    if not _active.acquire(blocking=False):
        raise RuntimeError(
            "track: another track() records in this process, and one cannot see what the other "
            "does; end that block first"
        )
    with ExitStack() as stack:
        stack.callback(_active.release)
        recorder = _Recorder(model)
        record = Record(type(model).__name__)
        stack.callback(lambda: recorder.give(record))
        recorder.follow(model, stack)
        set_observer(recorder.sites.because)
        stack.callback(set_observer, None)
        stack.enter_context(recorder)
        yield record


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sites = Sites(model)
        self._plan = _plan_of(model)
        self._mesh = _mesh_of(model)
        self._began = perf_counter()
        self._events: list[Operator | Collective] = []
        self._calls: list[Call] = []
        self._sent: dict[int, int] = {}  # memory of a result that nobody has waited for: its event
        self._ends: dict[int, float] = {}  # of collectives, by event
        self._axes: dict[str, str] = {}  # by name of a group
        self._optimizing = False
        self._operator = ""  # the DTensor operator that runs,
        self._passing = False  # and whether it is about to be DTensor's

    def follow(self, model: nn.Module, stack: ExitStack) -> None:
        """Registers hooks around those of the plan, on every module; the stack takes them away."""
        for path, module in model.named_modules():  # each once, by its first name
            around = self._around(path)
            for handle in (
                module.register_forward_pre_hook(around.enter, prepend=True),
                module.register_forward_hook(around.leave, always_call=True),
            ):
                stack.callback(handle.remove)
        for handle in (
            register_optimizer_step_pre_hook(lambda *_: self._optimize(True)),
            register_optimizer_step_post_hook(lambda *_: self._optimize(False)),
        ):
            stack.callback(handle.remove)

    def give(self, record: Record) -> None:
        """Completes a record."""
        events = [
            replace(event, duration=self._ends[at] - event.start) if at in self._ends else event
            for at, event in enumerate(self._events)
        ]
        # An operator comes before the collectives that it made, which ended before it.
        events.sort(key=lambda event: event.start)
        record._set(tuple(events), tuple(sorted(self._calls, key=lambda call: call.start)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._passing:
            self._passing = False
            return NotImplemented
        if any(issubclass(one, _LATER) for one in types):
            if self._operator or not any(issubclass(one, DTensor) for one in types):
                return NotImplemented
            return self._run_operator(func, args, kwargs)
        if func is _WAIT:
            return self._wait(func, args)
        collective = name_of(func)
        if (collective and tensors_of(args)) or collective == "barrier":
            return self._run_collective(collective, func, args, kwargs)
        if self._operator or func.namespace in _NO_OPERATORS or self._helps():
            return func(*args, **kwargs)
        return self._run_plain(func, args, kwargs)

    def _run_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = placed((args, kwargs))
        self._operator = operator_name(func)
        self._passing = True
        start = self._time()
        try:
            with self:
                result = func(*args, **kwargs)
        finally:
            self._operator, self._passing = "", False
        self._add_operator(func, before, result, start)
        return result

    def _run_plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = placed((args, kwargs))
        start = self._time()
        result = func(*args, **kwargs)
        self._add_operator(func, before, result, start)
        return result

    def _add_operator(self, func: Any, before: str, result: Any, start: float) -> None:
        origin, end = self.sites.now(), self._time()
        self._events.append(
            Operator(
                operator_name(func), origin.site, self._phase(), before, placed(result),
                local_bytes(result), start, end - start,
            )
        )  # fmt: skip

    def _run_collective(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        at, start = len(self._events), self._time()
        result = func(*args, **kwargs)
        duration = self._time() - start
        group = group_of(func, args)
        axis = "" if group is None else self._axis(group)
        origin = self.sites.now()
        why = self._why(origin, axis)
        cause = origin.cause
        # What is sent for many parameters at once belongs to none of their modules.
        site = None if why.text == "gradients" else origin.site
        self._events.append(
            Collective(
                name, site, self._phase(), axis, None if group is None else group.size(),
                shorts(cause.before) if cause else "", shorts(cause.after) if cause else "",
                bytes_of(args, result), why.text, why.line, start, duration,
            )
        )  # fmt: skip
        work = work_of(result)
        if work is not None:
            self._call_at_end(work, at)
        for tensor in tensors_of(result) if work is None else ():
            self._sent[tensor.data_ptr()] = at
        return result

    def _wait(self, func: Any, args: tuple[Any, ...]) -> Any:
        result = func(*args)
        for tensor in tensors_of(args):
            at = self._sent.pop(tensor.data_ptr(), None)
            if at is not None:
                self._ends[at] = self._time()
        return result

    def _call_at_end(self, work: dist.Work, at: int) -> None:
        def ended(_: object) -> None:
            self._ends[at] = self._time()

        with suppress(RuntimeError):  # not every kind of work has a future
            work.get_future().add_done_callback(ended)

    def _why(self, origin: Origin, axis: str) -> _Why:
        cause = origin.cause
        if cause is None:
            # What hangs on parameters to send their gradients does so when they arrive.
            return _Why(self._operator or ("gradients" if origin.param else ""))
        if cause.step is None:
            return _Why(f"gradient of {origin.param}" if origin.param else "gradients")
        if self._plan is None:
            return _Why("plan")
        entries = [self._plan.entries[number] for number in cause.step.entries]
        own = [one for one in entries if set(one.axes) & set(axis.split("+"))] or entries
        return _Why("plan", ", ".join(dict.fromkeys(one.line for one in own)))

    def _helps(self) -> bool:
        """Whether what runs is part of a move or of a reduction, with local tensors."""
        origin = self.sites.now()
        return origin.cause is not None or bool(origin.param)

    def _axis(self, group: dist.ProcessGroup) -> str:
        name = group.group_name
        if name not in self._axes:
            self._axes[name] = axis_of(group, self._mesh)
        return self._axes[name]

    def _phase(self) -> Phase:
        if torch._C._current_graph_task_id() != -1:
            return Phase.BACKWARD
        return Phase.OPTIMIZER if self._optimizing else Phase.FORWARD

    def _optimize(self, begins: bool) -> None:
        self._optimizing = begins

    def _time(self) -> float:
        return 1e6 * (perf_counter() - self._began)

    def _around(self, path: str) -> _Around:
        """Hooks for the begin and the end of a module."""
        opened: list[_Opened] = []

        def enter(*_: object) -> None:
            opened.append(_Opened(self.sites.depth, self._phase(), self._time()))
            self.sites.enter(path)

        def leave(*_: object) -> None:
            if opened:  # not if a hook before `enter` raised
                one = opened.pop()
                self.sites.leave(one.depth)
                self._calls.append(Call(path, one.phase, one.start, self._time() - one.start))

        return _Around(enter, leave)


@dataclass(frozen=True)
class _Opened:
    depth: int
    phase: Phase
    start: float


@dataclass(frozen=True)
class _Around:
    enter: Callable[..., None]
    leave: Callable[..., None]


@dataclass(frozen=True)
class _Why:
    text: str
    line: str = ""


def _plan_of(model: nn.Module) -> Plan | None:
    try:
        return installed(model).plan
    except ValueError:  # not parallelized: it is recorded all the same
        return None


def _mesh_of(model: nn.Module) -> DeviceMesh | None:
    meshes = (param.device_mesh for param in model.parameters() if isinstance(param, DTensor))
    return next(meshes, None)
