"""Counts the collectives and products of a block of code, without changing how it is dispatched.

Note: a collective is one call that reached a process group (one ``c10d::`` operator); a coalesced
call is one collective with many tensors. Bytes are this rank's. "Wire" bytes are those it sends to
other ranks, under the conventions of `Collective.wire_bytes`.

The record comes from torch's execution trace, whose callback is called by the dispatcher. A
`TorchDispatchMode` would be simpler, but DTensor dispatch, native or by dtensor-rules, takes
another path while one is active: what was measured would not be what runs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar, get_args

import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver

from testkit.comm_log.collective import Collective, Op
from testkit.comm_log.execution_trace import read_collectives, read_product_flops

__all__ = ["CommLog"]

_T = TypeVar("_T")

_active = threading.Lock()  # the observer is one per process
_CALLBACK_TIME = 0.02  # seconds; a callback takes microseconds, but its thread may have to wait


class CommLog:
    """Records every collective issued while the block runs, by any thread of this process.

    Works on real and fake process groups, inside `run_ranks` and outside, for functional and plain
    collectives, the reducers of DDP and FSDP, point-to-point operations, coalescing managers, and
    C++ code that calls a `ProcessGroup`. Work may still be under way when the block ends.

    It cannot see:
        - calls on a backend object (`group._get_backend(device).allreduce(...)`), NCCL called
          directly, symmetric memory, and CUDA graph replays: they pass the dispatcher by;
        - collectives on FakeTensors or while tracing: nothing is sent;
        - store traffic (process group creation, rendezvous).

    Example:
        >>> with CommLog() as log:
        ...     full = dtensor.full_tensor()
        >>> log.assert_counts({"all_gather": 1})
        >>> log.bytes("all_gather")
        4096

    Raises:
        RuntimeError: on entry, when a CommLog or another execution trace is already running; on
            exit, when the trace holds a collective that this version cannot weigh.
    """

    def __init__(self) -> None:
        self._calls: tuple[Collective, ...] | None = None
        self._product_flops: int | None = None
        self._observer: ExecutionTraceObserver | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> CommLog:
        if self._folder is not None:
            raise RuntimeError("CommLog: this log was already used; make a new CommLog() per block")
        if not _active.acquire(blocking=False):
            raise RuntimeError(
                "CommLog: another CommLog is recording in this process; torch has one execution "
                "trace, so end the other block first"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="comm-log-")
        self._observer = ExecutionTraceObserver()
        try:
            with _quiet_stderr():
                self._observer.register_callback(str(self._file))
            if not self._file.exists():  # torch reports success when another observer is there
                self._observer._registered = False  # its destructor would end the other's trace
                raise RuntimeError(
                    "CommLog: torch's execution trace is in use by another observer or profiler; "
                    "unregister that one first"
                )
            with _quiet_stderr():
                self._observer.start()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._observer is not None
        try:
            with _quiet_stderr():
                self._observer.stop()
                _let_callbacks_finish()
                self._observer.unregister_callback()
            trace = json.loads(self._file.read_text())
            self._calls = read_collectives(trace)
            self._product_flops = read_product_flops(trace)
        except Exception:
            if exc is None:  # never hide the block's own error
                raise
        finally:
            self._release()

    @property
    def calls(self) -> tuple[Collective, ...]:
        """Every collective in order of issue, barriers included.

        Raises:
            RuntimeError: before the block has ended.
        """
        return _recorded(self._calls)

    @property
    def product_flops(self) -> int:
        """FLOPs of the matrix products and the fused CPU attention that this process computed.

        Of operators on DTensors those of their local tensors. Convolutions are left out.

        Raises:
            RuntimeError: before the block has ended.
        """
        assert self.calls is not None
        return _recorded(self._product_flops)

    def counts(self, *, barriers: bool = False) -> dict[str, int]:
        """Number of collectives per op, ops that did not run left out.

        Args:
            barriers: count barriers as well.
        """
        return dict(Counter(call.op for call in self.calls if barriers or call.op != "barrier"))

    def bytes(self, op: Op | None = None) -> int:
        """Bytes of payload: per call the larger of its input and its output.

        That is the size of the whole gathered, scattered or reduced tensor on this rank; for bytes
        that travel, sum `Collective.wire_bytes`.

        Args:
            op: count this op only.
        """
        return sum(
            max(call.input_bytes, call.output_bytes)
            for call in self.calls
            if op is None or call.op == op
        )

    def wire_bytes(self, op: Op | None = None) -> int:
        """Bytes this rank sent to others, under the conventions of `Collective.wire_bytes`.

        Args:
            op: count this op only.

        Raises:
            ValueError: for a call whose share cannot be derived, naming it.
        """
        total = 0
        for call in self.calls:
            if op is not None and call.op != op:
                continue
            if call.wire_bytes is None:
                raise ValueError(
                    f"CommLog: the wire bytes of [{call}] cannot be derived, for its group is "
                    "unknown (several exist, or it is gone); use a functional collective, or "
                    "compute them from input_bytes and the group's size"
                )
            total += call.wire_bytes
        return total

    def assert_counts(self, expected: Mapping[str, int], *, barriers: bool = False) -> None:
        """Asserts exactly these collectives ran: ops not named must not have run.

        Args:
            expected: number per op, e.g. ``{"all_gather": 2}``; a zero is the same as no entry.
            barriers: barriers count as well.

        Raises:
            AssertionError: when the counts differ; lists what ran, in order.
            ValueError: for an op that does not exist.
        """
        unknown = sorted(set(expected) - set(get_args(Op)))
        if unknown:
            raise ValueError(f"CommLog: no such op {unknown}; known are {sorted(get_args(Op))}")
        wanted = {op: count for op, count in expected.items() if count}
        got = self.counts(barriers=barriers)
        if got == wanted:
            return
        shown = [call for call in self.calls if barriers or call.op != "barrier"]
        lines = [f"  {i}: {call}" for i, call in enumerate(shown)] or ["  nothing"]
        raise AssertionError("\n".join([f"expected {wanted}, got {got}; in order:", *lines]))

    def _release(self) -> None:
        assert self._folder is not None
        self._folder.cleanup()
        _active.release()

    @property
    def _file(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, "trace.json")


def _recorded(value: _T | None) -> _T:
    if value is None:
        raise RuntimeError("CommLog: no record yet; read it after the `with` block has ended")
    return value


def _let_callbacks_finish() -> None:
    """Waits for callbacks that are under way on the backend's threads.

    Unregistering frees the observer even while such a thread writes to it, when a work that nobody
    has waited for ends at this moment: seen as a segmentation fault. Later callbacks find it
    stopped, or gone, and do nothing. The fake backend has no threads.
    """
    if dist.is_initialized() and dist.get_backend() != "fake":
        time.sleep(_CALLBACK_TIME)


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Drops what C++ writes to fd 2: the observer announces itself on every start and stop."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
