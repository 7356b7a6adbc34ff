"""Exchanges rank snapshots through the store of the process group."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from fused_comm import _compat
from fused_comm.diagnosis.rank_snapshot import RankSnapshot

__all__ = ["StoreChannel", "call_in_thread"]

_REQUEST_SECONDS = 5.0
# Numbers the channels of a process group: this process may have been in other groups before, with
# fewer ranks, so a count per process would differ between ranks.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]]
_numbers = weakref.WeakKeyDictionary()
_T = TypeVar("_T")


def call_in_thread(request: Callable[[], _T]) -> Future[_T]:
    """Calls a function that may never return, such as a request to a store, in a daemon thread.

    Args:
        request: the future has what it returns or raises; it is never cancelled.
    """
    future = Future[_T]()

    def call() -> None:
        try:
            future.set_result(request())
        except BaseException as error:  # raised again by future.result()
            future.set_exception(error)

    threading.Thread(target=call, name="store request", daemon=True).start()
    return future


class StoreChannel:
    """The newest snapshot of each rank, in a store; all ranks make their channels in one order.

    Every method raises RuntimeError where the host of the store, or the link to it, is gone. Such a
    connection does not fail by itself for many minutes, and the client of the store has no time-out
    of its own: even that of ``wait`` is the server's (c10d/TCPStore.cpp, doWait: the client
    cancels, and waits for the answer to that). So each request runs in a thread, and no other is
    made until that one has returned.
    """

    def __init__(self) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        number = next(_numbers.setdefault(_compat.default_group(), itertools.count()))
        self._prefix = f"fused_comm.diagnosis/{number}"
        # Another connection, as the first may be blocked by a rank that waits in the store.
        self._store = _compat.connect_to_store()
        self._pending: Future[Any] | None = None
        self._one_at_a_time = threading.Lock()
        # The store may be older than this process, as torchrun's is, and have a snapshot of the
        # process before a restart. A fake process group's store has no delete_key; where another
        # store fails here, the first `publish` raises the error.
        with contextlib.suppress(RuntimeError):
            self.withdraw()

    def publish(self, snapshot: RankSnapshot) -> None:
        """Makes the snapshot of this rank visible to the others."""
        message: Any = pickle.dumps(snapshot)  # the stub says str, and bytes are accepted
        self._request(lambda: self._store.set(self._key(self._rank), message))

    def withdraw(self) -> None:
        """Removes this rank's snapshot, as the rank has continued."""
        self._request(lambda: self._store.delete_key(self._key(self._rank)))

    def poll(self, known: Collection[int]) -> dict[int, RankSnapshot]:
        """Returns the published snapshots by rank, without those of the known ranks."""
        return self._request(
            lambda: {
                rank: pickle.loads(self._store.get(self._key(rank)))
                for rank in range(self._size)
                if rank not in known and self._store.check([self._key(rank)])
            }
        )

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _request(self, request: Callable[[], _T]) -> _T:
        with self._one_at_a_time:
            if self._pending is None or self._pending.done():
                self._pending = future = call_in_thread(request)
                with contextlib.suppress(TimeoutError):
                    return future.result(_REQUEST_SECONDS)
        raise RuntimeError(f"the store has not answered within {_REQUEST_SECONDS:g} s")
