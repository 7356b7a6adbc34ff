"""The order in which modules run, from which the all-gathers to prefetch are chosen."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["ExecutionOrder"]

T = TypeVar("T")  # a state, of the modules of one call of fully_shard


class ExecutionOrder(Generic[T]):
    """The order in which the modules of states run, from which prefetches are chosen.

    In forward, the state that is prefetched is the one that came next in the last forward, as long
    as this forward runs in the same order; in the first forward there is none. All ranks have the
    same history, and so issue the same all-gathers. In backward, it is the state whose forward
    ended just before.
    """

    def __init__(self) -> None:
        self._last_forward: list[T] = []
        self._forward: list[T] = []
        self._repeats = False  # whether this forward runs in the order of the last one so far
        self._post_forward: list[T] = []
        self._indices: dict[int, list[int]] = {}  # of each state in _post_forward

    def begin_forward(self) -> None:
        """Records the begin of the root's forward."""
        self._forward, self._repeats = [], True

    def end_forward(self) -> None:
        """Records the end of the root's forward."""
        self._last_forward, self._forward, self._repeats = self._forward, [], False

    def pre_forward(self, state: T) -> T | None:
        """Records the begin of a forward; returns the state whose forward follows, if known."""
        index, last = len(self._forward), self._last_forward
        self._forward.append(state)
        self._repeats = self._repeats and index < len(last) and last[index] is state
        return last[index + 1] if self._repeats and index + 1 < len(last) else None

    def post_forward(self, state: T) -> None:
        """Records the end of a forward that a backward will follow."""
        self._indices.setdefault(id(state), []).append(len(self._post_forward))
        self._post_forward.append(state)

    def pre_backward(self, state: T) -> T | None:
        """Records the begin of a backward; returns the state whose backward follows, if known."""
        indices = self._indices.get(id(state))
        if not indices:
            return None  # several backwards of one forward
        index = indices.pop()
        return self._post_forward[index - 1] if index else None

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward will follow some forward."""
        return bool(self._post_forward)

    def end_backward(self) -> None:
        """Records the end of all backwards."""
        self._post_forward.clear()
        self._indices.clear()
