"""Runs a function on several gloo ranks, and reports which rank failed and how."""

from __future__ import annotations

import functools
import importlib.machinery
import io
import os
import pickle
import pkgutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeVar

import cloudpickle  # type: ignore[import-untyped]  # it has no stubs
from torch.distributed.tensor.placement_types import Placement

from testkit.ranks.forkserver import ForkServer, shared_server
from testkit.ranks.messages import Reply, Task, WarningFilter
from testkit.ranks.pool import START_TIMEOUT, Pool, Rank, receive, wait_for_ranks

T = TypeVar("T")

MAX_RANKS = 8
_GRACE = 1.0  # seconds that the other ranks may take after a rank has failed

_lock = threading.Lock()
_pool: Pool | None = None


@dataclass(frozen=True)
class RankReport:
    """The end of one rank of a failed call.

    Attributes:
        rank: its number.
        state: ``"raised"``; ``"died"`` (by a signal or an exit); ``"hung"`` at the time limit;
            ``"running"`` if another rank's failure ended the call; ``"not ready"`` if it did not
            start, or did not leave the previous call.
        detail: a traceback, a stack, or how the process ended.
        output: the end of its stdout and stderr.
    """

    rank: int
    state: Literal["raised", "died", "hung", "running", "not ready"]
    detail: str
    output: str

    def __str__(self) -> str:
        lines = self.detail.splitlines()
        if self.output:
            lines += ["output:", *(f"  {line}" for line in self.output.splitlines())]
        return "\n".join(f"[rank {self.rank}] {line}".rstrip() for line in lines)


class RankError(RuntimeError):
    """Is raised if a call failed on at least one rank.

    Attributes:
        reports: one for each rank that did not finish: failures in order of arrival, then ranks
            that were still running.
    """

    def __init__(self, summary: str, reports: Sequence[RankReport]) -> None:
        super().__init__("\n".join([summary, *map(str, reports)]))
        self.reports = tuple(reports)


def run_ranks(
    fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[T]:
    """Runs ``fn(*args, **kwargs)`` on `world_size` processes, in a fresh gloo process group.

    The processes are started once and reused (`testkit.ranks.pool`). Between calls the process
    group is destroyed, torch's distributed caches are cleared and the seeds of `torch` and `random`
    are set to 0; other changes that `fn` makes in its process persist. Ranks have the caller's
    `sys.path` and warning filters, and one thread each. Their output is printed with their numbers
    if the call succeeds, and is part of the error if it fails.

    Args:
        fn: a function, closure or lambda; functions of test modules are sent by value. Its rank is
            `torch.distributed.get_rank()`.
        world_size: the number of ranks, 1 to 8.
        *args: sent to every rank.
        timeout: seconds after which running ranks are killed, without the start of processes.
        **kwargs: sent to every rank.

    Returns:
        the results of `fn` by rank: plain tensors, or any objects that can be pickled.

    Raises:
        RankError: a rank raised, died, hung, could not start, or its result cannot be sent; the
            message has the traceback or stack and the output of each. The pool is closed.
        TypeError: `fn` is not callable, it or an argument cannot be sent, or `world_size` is not an
            integer.
        ValueError: `world_size` or `timeout` is out of range.
        RuntimeError: it is called on a rank.
    """
    return run_in_pool_of("cpu", fn, world_size, args, kwargs, timeout)


def run_in_pool_of(
    device: str,
    fn: Callable[..., T],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    start_device: Callable[[int], str] | None = None,
) -> list[T]:
    """`run_ranks` on processes for a device, as a process that has loaded one cannot unload it.

    Another device than that of the call before starts new processes. `start_device` is `Task`'s.
    """
    global _pool
    _check(fn, world_size, timeout)
    with _lock:  # a rank has one process group, and cloudpickle one registry
        payload = _dumps(fn, args, kwargs, start_device)
        if _pool is not None and not (_pool.device == device and _pool.usable()):
            _pool.close()
            _pool = None
        if _pool is None:
            _pool = Pool(_usable_server(), device)
        try:
            _prepare(_pool, world_size)
            _pool.send(world_size, payload)
            results = _collect(_pool.ranks[:world_size], timeout)
            _pool.release(world_size)
        except BaseException:  # KeyboardInterrupt included: ranks are still running the call
            _pool.close()
            _pool = None
            raise
    return results


def _check(fn: object, world_size: object, timeout: float) -> None:
    if not callable(fn):
        raise TypeError(
            f"run_ranks: expected a function, got fn={fn!r}; pass it without calling it"
        )
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        raise TypeError(f"run_ranks: expected world_size= from 1 to 8, got {world_size!r}")
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(
            f"run_ranks: expected world_size= from 1 to {MAX_RANKS}, got {world_size}; "
            "for more ranks without communication use testkit.fake_mesh"
        )
    if not timeout > 0:
        raise ValueError(f"run_ranks: expected a positive timeout= in seconds, got {timeout}")
    if "TESTKIT_RANK" in os.environ:
        raise RuntimeError(
            f"run_ranks: expected a call outside of ranks, got one on rank "
            f"{os.environ['TESTKIT_RANK']} of another run_ranks; use dist.new_group() for subgroups"
        )


def _collect(ranks: list[Rank], timeout: float) -> list[Any]:
    """Waits for every rank's reply; raises a RankError if one fails."""
    start = time.monotonic()
    deadline = start + timeout
    results: dict[int, Any] = {}
    failures: list[RankReport] = []
    waiting = list(ranks)
    while waiting and (ready := wait_for_ranks(waiting, deadline)):
        for rank in ready:
            waiting.remove(rank)
            outcome = _outcome(rank)
            if isinstance(outcome, RankReport):
                failures.append(outcome)
                deadline = min(deadline, time.monotonic() + _GRACE)
            else:
                results[rank.index] = outcome.value
    if waiting or failures:
        raise _call_error(failures, waiting, len(ranks), timeout)
    for rank in ranks:
        if text := rank.output():
            print("\n".join(f"[rank {rank.index}] {line}" for line in text.splitlines()))
    return [results[rank.index] for rank in ranks]


@dataclass(frozen=True)
class _Result:
    value: Any


def _outcome(rank: Rank) -> _Result | RankReport:
    reply: Reply | None = receive(rank)
    if reply is None:
        return RankReport(rank.index, "died", f"{rank.ending()} during the call", rank.output())
    if reply.payload is None:
        return RankReport(rank.index, "raised", reply.failure, rank.output())
    try:
        return _Result(pickle.loads(reply.payload))
    except Exception as error:
        detail = f"its result cannot be unpickled: {type(error).__name__}: {error}"
        return RankReport(rank.index, "raised", detail, rank.output())


def _call_error(
    failures: list[RankReport], waiting: list[Rank], world_size: int, timeout: float
) -> RankError:
    state: Literal["running", "hung"] = "running" if failures else "hung"
    summary = [f"{report.state} on rank {report.rank}" for report in failures]
    summary += [f"rank {rank.index} {state}" for rank in waiting]
    limit = "" if failures else f" after {timeout:g} s"
    reports = [
        RankReport(rank.index, state, f"still running{limit}, at\n{rank.stack()}", rank.output())
        for rank in waiting
    ]
    return RankError(f"run_ranks on {world_size}: {', '.join(summary)}", [*failures, *reports])


def _usable_server() -> ForkServer:
    try:
        return shared_server()
    except OSError as error:
        message = f"run_ranks: cannot start the process that forks ranks: {error}"
        raise RankError(message, []) from error


def _prepare(pool: Pool, world_size: int) -> None:
    try:
        failed = pool.prepare(world_size)
    except OSError as error:
        raise RankError(f"run_ranks: cannot start rank {len(pool.ranks)}: {error}", []) from error
    if not failed:
        return
    reports = []
    for rank in failed:
        if rank.process.poll() is None:
            detail = f"not ready after {START_TIMEOUT:g} s, at\n{rank.stack()}"
        else:
            detail = f"{rank.ending()} while it started, or left the previous call"
        reports.append(RankReport(rank.index, "not ready", detail, rank.output()))
    numbers = ", ".join(str(rank.index) for rank in failed)
    raise RankError(f"run_ranks on {world_size}: rank {numbers} not ready", reports)


def _dumps(
    fn: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    start_device: Callable[[int], str] | None,
) -> bytes:
    with _by_value([fn, *args, *kwargs.values()]):
        try:
            buffer = io.BytesIO()
            _TaskPickler(buffer).dump(Task(fn, args, kwargs, _warning_filters(), start_device))
            return buffer.getvalue()
        except Exception as error:
            raise TypeError(
                f"run_ranks: {fn!r} or its arguments cannot be sent to the ranks ({error}); "
                "pass plain values and build the rest inside the function"
            ) from error


class _TaskPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no stubs
    """Sends modules of a special class, such as torch.ops, by name, as cloudpickle others.

    The metaclass of placements is sent as the class of `Placement`: torch 2.11's is pybind11's,
    which no module has, and a copy of it would not be the metaclass of the rank's `Placement`.
    """

    def reducer_override(self, obj: object) -> Any:
        if obj is type(Placement):
            return type, (Placement,)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            return pkgutil.resolve_name, (obj.__name__,)
        return super().reducer_override(obj)


def _warning_filters() -> tuple[WarningFilter, ...]:
    return tuple(
        WarningFilter(action, _pattern(message), category, _pattern(module), lineno)
        for action, message, category, module, lineno in warnings.filters
        if isinstance(category, type)
    )


def _pattern(expression: Any) -> str:
    return str(getattr(expression, "pattern", expression) or "")


@contextmanager
def _by_value(objects: Sequence[object]) -> Iterator[None]:
    """Makes cloudpickle send the modules of objects by value, if ranks cannot import them."""
    modules = {id(module): module for module in map(_module, objects) if module is not None}
    registered = []
    for module in modules.values():
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _module(obj: object) -> ModuleType | None:
    """Returns the module that defines an object's code, if a new process cannot import it."""
    while isinstance(obj, functools.partial):
        obj = obj.func
    name = getattr(obj, "__module__", None) or type(obj).__module__
    module = sys.modules.get(name)
    return None if module is None or _importable(module) else module


def _importable(module: ModuleType) -> bool:
    """Whether the import system finds the module's file by its name.

    It does not for modules that pytest imports in importlib mode, and for the main script.
    """
    path, spec = None, None
    parts = module.__name__.split(".")
    if parts[0] in sys.stdlib_module_names:  # frozen modules have no file
        return True
    for end in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:end]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    assert spec is not None
    return spec.origin == getattr(module, "__file__", spec.origin)


def _find(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Finds a module as `importlib.util.find_spec`, but not in sys.modules."""
    for finder in sys.meta_path:
        if spec := finder.find_spec(name, path):
            return spec
    return None
