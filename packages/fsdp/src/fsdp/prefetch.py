"""What is gathered next: the order of the last forward, and its reverse in backward."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

__all__ = ["Order"]


class Order(Generic[T]):
    """The order in which modules ran.

    In forward the next one is what came next in the last forward, for as long as this one takes
    the same way; so there is nothing to say in the first. Every rank has the same history, and so
    issues the same gathers. In backward it is the one whose forward ended just before.
    """

    def __init__(self) -> None:
        self._last: list[T] = []
        self._now: list[T] = []
        self._same = False
        self._ended: list[T] = []
        self._places: dict[int, list[int]] = {}

    def begin_forward(self) -> None:
        """The root's forward begins."""
        self._now, self._same = [], True

    def end_forward(self) -> None:
        """The root's forward ended."""
        self._last, self._now, self._same = self._now, [], False

    def enter(self, module: T) -> T | None:
        """A module's forward begins; the one that follows it, if that is known."""
        place = len(self._now)
        self._now.append(module)
        self._same = self._same and place < len(self._last) and self._last[place] is module
        return self._last[place + 1] if self._same and place + 1 < len(self._last) else None

    def leave(self, module: T) -> None:
        """A module's forward ended, and a backward will come."""
        self._places.setdefault(id(module), []).append(len(self._ended))
        self._ended.append(module)

    def enter_backward(self, module: T) -> T | None:
        """A module's backward begins; the one that follows it, if that is known."""
        places = self._places.get(id(module))
        if not places:
            return None  # several backwards of one forward
        place = places.pop()
        return self._ended[place - 1] if place else None

    def end_backward(self) -> None:
        """All backwards ended."""
        self._ended.clear()
        self._places.clear()
