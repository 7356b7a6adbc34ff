"""Counts the collectives and products of a block of code, without changing how it is dispatched.

Note: a collective is one call of a process group (one ``c10d::`` operator); a coalesced call is one
collective with many tensors. Bytes are this rank's. "Wire" bytes are those it sends to other ranks,
under the conventions of `Collective.wire_bytes`.

Calls are read from torch's execution trace, whose callback the dispatcher calls. A
`TorchDispatchMode` would be simpler, but DTensor dispatch, native or by dtensor-rules, takes
another path while one is active, so other code would be measured than runs without it.
"""

from __future__ import annotations

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
from testkit.comm_log.execution_trace import read_calls, read_collectives, read_product_flops

__all__ = ["CommLog"]

_T = TypeVar("_T")

_active = threading.Lock()  # the observer is one per process
_CALLBACK_TIME = 0.02  # seconds; a callback takes microseconds, but its thread may be delayed


class CommLog:
    """Records every collective that any thread of this process issues in the block.

    Supported are real and fake process groups, inside and outside of `run_ranks`, functional and
    other collectives, the reducers of DDP and FSDP, point-to-point operations, coalescing managers,
    and C++ code that calls a `ProcessGroup`. Work may be in flight when the block ends.

    Not recorded are:
        - calls of a backend (`group._get_backend(device).allreduce(...)`), direct calls of NCCL,
          symmetric memory, and CUDA graph replays, which bypass the dispatcher;
        - collectives on FakeTensors or while tracing, which send nothing;
        - store traffic (process group creation, rendezvous).

    Example:
        >>> with CommLog() as log:
        ...     full = dtensor.full_tensor()
        >>> log.assert_counts({"all_gather": 1})
        >>> log.bytes("all_gather")
        4096

    Raises:
        RuntimeError: on entry, if a CommLog or another execution trace is already running; on exit,
            if the trace has a collective whose bytes are unknown.
    """

    def __init__(self) -> None:
        self._calls: tuple[Collective, ...] | None = None
        self._product_flops: int | None = None
        self._observer: ExecutionTraceObserver | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> CommLog:
        if self._folder is not None:
            raise RuntimeError(
                "CommLog: expected an unused log, got one of an earlier block; make one per block"
            )
        if not _active.acquire(blocking=False):
            raise RuntimeError(
                "CommLog: expected no other active CommLog, got one in this process, as torch has "
                "one execution trace; end the other block first"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="comm-log-")
        self._observer = ExecutionTraceObserver()
        try:
            with _quiet_stderr():
                self._observer.register_callback(str(self._file))
            if not self._file.exists():  # torch reports success if another observer exists
                self._observer._registered = False  # its destructor would end the other's trace
                raise RuntimeError(
                    "CommLog: expected no active execution trace, got one of another observer or "
                    "profiler; unregister that one first"
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
            nodes = read_calls(self._file.read_text())
            self._calls = read_collectives(nodes)
            self._product_flops = read_product_flops(nodes)
        except Exception:
            if exc is None:  # do not replace an error of the block
                raise
        finally:
            self._release()

    @property
    def calls(self) -> tuple[Collective, ...]:
        """All collectives in order of issue, barriers included.

        Raises:
            RuntimeError: the block has not ended.
        """
        return _recorded(self._calls)

    @property
    def product_flops(self) -> int:
        """FLOPs of the matrix products and the fused CPU attention that this process computed.

        For operators on DTensors, of their local tensors. Convolutions are not counted.

        Raises:
            RuntimeError: the block has not ended.
        """
        assert self.calls is not None
        return _recorded(self._product_flops)

    def counts(self, *, barriers: bool = False) -> dict[str, int]:
        """Returns the number of collectives of each op that was called.

        Args:
            barriers: whether to count barriers too.
        """
        return dict(Counter(call.op for call in self.calls if barriers or call.op != "barrier"))

    def bytes(self, op: Op | None = None) -> int:
        """Returns the bytes of payload: for each call the larger of its input and its output.

        This is the size of the gathered, scattered or reduced tensor on this rank; `wire_bytes`
        returns the bytes that are sent.

        Args:
            op: to count; None for all.
        """
        return sum(
            max(call.input_bytes, call.output_bytes)
            for call in self.calls
            if op is None or call.op == op
        )

    def wire_bytes(self, op: Op | None = None) -> int:
        """Returns the bytes that this rank sent, by the conventions of `Collective.wire_bytes`.

        Args:
            op: to count; None for all.

        Raises:
            ValueError: the bytes of a call are unknown; names it.
        """
        total = 0
        for call in self.calls:
            if op is not None and call.op != op:
                continue
            if call.wire_bytes is None:
                raise ValueError(
                    f"CommLog: expected a collective of a known group, got [{call}], whose group "
                    "is not recorded (several exist, or it was destroyed); use a functional "
                    "collective, or compute its wire bytes from input_bytes and the group's size"
                )
            total += call.wire_bytes
        return total

    def assert_counts(self, expected: Mapping[str, int], *, barriers: bool = False) -> None:
        """Asserts that exactly these collectives were issued, and no others.

        Args:
            expected: the number of each op, e.g. ``{"all_gather": 2}``; 0 is the same as no entry.
            barriers: whether to count barriers too.

        Raises:
            AssertionError: the counts differ; lists the recorded collectives in order.
            ValueError: an op does not exist.
        """
        unknown = sorted(set(expected) - set(get_args(Op)))
        if unknown:
            raise ValueError(f"CommLog: expected ops of {sorted(get_args(Op))}, got {unknown}")
        expected = {op: count for op, count in expected.items() if count}
        actual = self.counts(barriers=barriers)
        if actual == expected:
            return
        calls = [call for call in self.calls if barriers or call.op != "barrier"]
        lines = [f"  {i}: {call}" for i, call in enumerate(calls)] or ["  nothing"]
        raise AssertionError("\n".join([f"expected {expected}, got {actual}; in order:", *lines]))

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
        raise RuntimeError(
            "CommLog: expected a block that has ended, got one that runs; read the log after it"
        )
    return value


def _let_callbacks_finish() -> None:
    """Waits for callbacks that are running on the backend's threads.

    Unregistering frees the observer even while such a thread writes to it, which happens if a work
    that was not waited for ends at this moment, and causes a segmentation fault. Later callbacks do
    nothing, as the observer is stopped. The fake backend has no threads.
    """
    if dist.is_initialized() and dist.get_backend() != "fake":
        time.sleep(_CALLBACK_TIME)


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Discards output of C++ on fd 2: the observer logs every start and stop."""
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
