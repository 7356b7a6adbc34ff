"""The race checker: accesses of device memory that no stream, event or wait orders.

The simulated device reports every launch, copy, collective, event, wait, allocation and free with
its stream and, for memory, its bytes (``cpp/state.h``). Two accesses of overlapping bytes of one
storage, of which one writes, must be ordered. Freed memory, and what a resize gives up, is the
allocating stream's again, as in torch's caching allocators: the next allocation on that stream may
get it, and must be ordered behind every access, unless `Tensor.record_stream` has named the stream
of the access. torch's `StreamSynchronizations` keeps the order; torch's own checker compares
addresses of tensors, and finds neither overlapping views nor memory that is freed too early.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import defaultdict, deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch.cuda._sanitizer import StreamSynchronizations

from testkit.sim import load

Stream = tuple[int, int]  # the device and the number of the stream


class Kind(IntEnum):
    """What is reported, as in ``cpp/state.h``."""

    READ = 0
    WRITE = 1
    ALLOCATE = 2
    FREE = 3
    RECORD_EVENT = 4
    WAIT_EVENT = 5
    SYNC_STREAM = 6
    SYNC_EVENT = 7
    SYNC_DEVICE = 8
    USE = 9


_VERBS = {Kind.READ: "reads", Kind.WRITE: "writes", Kind.ALLOCATE: "may reuse"}


@dataclass(frozen=True)
class Access:
    """One access of a range of bytes of a storage.

    Attributes:
        kind: read, write, or an allocation that may get freed memory.
        stream: on which it is.
        number: of the access, in the order in which the host issued them.
        first: address of the first byte.
        last: address behind the last one.
        op: the operator or collective.
        stack: where it was issued, the innermost call last.
    """

    kind: Kind
    stream: Stream
    number: int
    first: int
    last: int
    op: str
    stack: traceback.StackSummary

    def __str__(self) -> str:
        where = "".join(self.stack.format()) or "  a C++ thread of autograd\n"
        return (
            f"{self.op} {_VERBS[self.kind]} {self.last - self.first} bytes on stream "
            f"{self.stream[1]} of device {self.stream[0]}, at\n{where}"
        )


@dataclass(frozen=True)
class Race:
    """Two accesses of the same bytes, of which at least one writes, in no order.

    Attributes:
        earlier: the one that the host issued first.
        later: the other one, whose stream does not wait for it.
    """

    earlier: Access
    later: Access

    def __str__(self) -> str:
        return (
            f"race: {self.later}and nothing orders it behind\n{self.earlier}"
            f"let stream {self.later.stream[1]} wait for an event that stream "
            f"{self.earlier.stream[1]} records after it"
        )


class RaceError(AssertionError):
    """Is raised at the end of a checked block in which accesses raced.

    Attributes:
        races: each pair of call sites once.
    """

    def __init__(self, races: tuple[Race, ...]) -> None:
        super().__init__("\n\n".join(map(str, races)))
        self.races = races


class RaceChecker:
    """Checks what the simulated device does within a ``with`` block.

    Args:
        frames: of the stack to keep with each access; they cost most of the time.

    Raises:
        RaceError: at the end of the block, if accesses raced.
    """

    def __init__(self, frames: int = 12) -> None:
        self.races: list[Race] = []
        self.accesses = 0
        self._frames = frames
        self._order = StreamSynchronizations()
        self._of_storage: defaultdict[int, list[Access]] = defaultdict(list)
        self._users: defaultdict[int, set[Stream]] = defaultdict(set)  # by record_stream
        # Accesses of freed memory that the stream which allocated it did not wait for yet.
        self._of_freed: defaultdict[Stream, list[Access]] = defaultdict(list)
        self._seen: set[tuple[str, str]] = set()
        self._lock = threading.RLock()  # autograd has a thread for each device
        self._reports: deque[Any] = deque()  # not handled yet
        self._handling = False

    def __enter__(self) -> RaceChecker:
        load().listen(self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        load().listen(None)
        if kind is None and self.races:
            raise RaceError(tuple(self.races))

    def _note(self, report: Any) -> None:
        with self._lock:
            self._reports.append(report)
            if self._handling:  # a collection of garbage, while a report is handled, frees tensors
                return
            self._handling = True
            try:
                while self._reports:
                    first = self._reports.popleft()
                    self._handle(first, Kind(first.kind), (first.device, first.stream))
            finally:
                self._handling = False

    def _handle(self, report: Any, kind: Kind, stream: Stream) -> None:
        order: Any = self._order  # whose keys are any that can be hashed
        match kind:
            case Kind.READ | Kind.WRITE:
                self._check(report, kind, stream)
            case Kind.ALLOCATE:
                self._of_storage.pop(report.id, None)  # of memory that has this address no longer
                self._users.pop(report.id, None)
                self._check_reuse(report, stream)
            case Kind.FREE:
                users = self._users.pop(report.id, set())
                for access in self._of_storage.pop(report.id, []):
                    # What a stream of `record_stream` has waited for is over before a reuse, too.
                    waits = [stream, *users]
                    if access.stream not in users and not any(
                        order.is_ordered_after(each, access.number, access.stream) for each in waits
                    ):
                        self._of_freed[stream].append(access)
            case Kind.USE:
                self._users[report.id].add(stream)
            case Kind.RECORD_EVENT:
                order.create_event(report.id)
                order.record_state(report.id, stream)
            case Kind.WAIT_EVENT:
                order.stream_wait_for_event(stream, report.id)
            case Kind.SYNC_STREAM:
                order.all_streams_wait_for_stream(stream)
            case Kind.SYNC_EVENT:
                order.all_streams_wait_for_event(report.id)
            case Kind.SYNC_DEVICE:
                order.sync_all_streams()

    def _check(self, report: Any, kind: Kind, stream: Stream) -> None:
        order: Any = self._order
        new = self._access(report, kind, stream)
        remaining = []
        for old in self._of_storage[report.id]:
            ordered = order.is_ordered_after(stream, old.number, old.stream)
            overlaps = old.first < new.last and new.first < old.last
            if overlaps and not ordered and Kind.WRITE in (kind, old.kind):
                self._found(Race(old, new))
            # What will be ordered behind `new` is then ordered behind `old`, too.
            covered = new.first <= old.first and old.last <= new.last and ordered
            if not (covered and (kind is Kind.WRITE or old.kind is Kind.READ)):
                remaining.append(old)
        self._of_storage[report.id] = [*remaining, new]
        order.update_seq_num(stream, new.number)

    def _check_reuse(self, report: Any, stream: Stream) -> None:
        order: Any = self._order
        freed = self._of_freed.pop(stream, [])
        late = [a for a in freed if not order.is_ordered_after(stream, a.number, a.stream)]
        if late:
            new = self._access(report, Kind.ALLOCATE, stream)
            for old in late:
                self._found(Race(old, new))

    def _access(self, report: Any, kind: Kind, stream: Stream) -> Access:
        self.accesses += 1
        first, last, stack = report.first, report.last, _stack(self._frames)
        return Access(kind, stream, self.accesses, first, last, report.op, stack)

    def _found(self, race: Race) -> None:
        sites = (_site(race.earlier), _site(race.later))
        if sites not in self._seen:
            self._seen.add(sites)
            self.races.append(race)


def _stack(limit: int) -> traceback.StackSummary:
    """The innermost frames that called this module; none on a C++ thread of autograd.

    `traceback.extract_stack` would look for each frame's file, for each access.
    """
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    frames: list[traceback.FrameSummary] = []
    while frame is not None and len(frames) < limit:
        code, line = frame.f_code, frame.f_lineno
        frames.append(
            traceback.FrameSummary(code.co_filename, line, code.co_name, lookup_line=False)
        )
        frame = frame.f_back
    return traceback.StackSummary.from_list(frames[::-1])


def _site(access: Access) -> str:
    frames = "".join(f"{frame.filename}:{frame.lineno};" for frame in access.stack)
    return f"{access.kind} {access.op} {frames}"
