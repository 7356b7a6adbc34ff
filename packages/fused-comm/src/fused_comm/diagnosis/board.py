"""Where ranks leave word of what they do: the store of the process group."""

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
from fused_comm.diagnosis.stand import Stand

__all__ = ["Board", "ask_in_thread"]

_ANSWER_SECONDS = 5.0
# Of boards of a process group: a process may have been in others, with fewer ranks, before.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]]
_numbers = weakref.WeakKeyDictionary()
_Answer = TypeVar("_Answer")


def ask_in_thread(question: Callable[[], _Answer]) -> Future[_Answer]:
    """Asks a store, which may never answer, in a daemon thread of its own.

    Args:
        question: what it returns or raises is the future's; it is never cancelled.
    """
    answer = Future[_Answer]()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # handed to who waits for it
            answer.set_exception(error)

    threading.Thread(target=ask, name="ask the store", daemon=True).start()
    return answer


class Board:
    """What each rank has said of itself last; all ranks make one in the same order.

    Every method raises RuntimeError where the host of the store is gone, or the way to it. Such a
    connection does not fail by itself for many minutes, and the store's client keeps no time-out:
    even that of ``wait`` is the server's (c10d/TCPStore.cpp, doWait: it cancels, and waits for the
    answer to that). So the store is asked in a thread of its own, and not again before that one has
    come back.
    """

    def __init__(self) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        number = next(_numbers.setdefault(_compat.default_group(), itertools.count()))
        self._keys = f"fused_comm.diagnosis/{number}"
        # A connection of its own: the other may be kept by who waits for a rank in the store.
        self._store = _compat.connect_to_store()
        self._asked: Future[Any] | None = None
        self._one_at_a_time = threading.Lock()
        # The store may be older than this process: torchrun's own is. A fake process group's takes
        # nothing; with another that fails here, the first `put` says so.
        with contextlib.suppress(RuntimeError):
            self.take_back()

    def put(self, stand: Stand) -> None:
        """Leaves word of this rank."""
        message = pickle.dumps(stand)
        self._ask(lambda: self._store.set(self._key(self._rank), message))  # type: ignore[arg-type]

    def take_back(self) -> None:
        """Removes it: this rank goes on."""
        self._ask(lambda: self._store.delete_key(self._key(self._rank)))

    def news(self, known: Collection[int]) -> dict[int, Stand]:
        """Returns what there is of ranks that are not known yet."""
        return self._ask(
            lambda: {
                rank: pickle.loads(self._store.get(self._key(rank)))
                for rank in range(self._size)
                if rank not in known and self._store.check([self._key(rank)])
            }
        )

    def _key(self, rank: int) -> str:
        return f"{self._keys}/{rank}"

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        with self._one_at_a_time:
            if self._asked is None or self._asked.done():
                self._asked = answer = ask_in_thread(question)
                try:
                    return answer.result(_ANSWER_SECONDS)
                except TimeoutError:
                    pass  # said below
        raise RuntimeError(f"their store has not answered within {_ANSWER_SECONDS:g} s")
