"""Keeps what the all-to-alls of a forward return, for its recomputation in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

__all__ = ["exchanged", "kept_exchange_contexts"]


class _KeptExchanges(AbstractContextManager[None]):
    """Makes the all-to-alls within it those of a forward, or of its recomputation.

    Args:
        rows: what the all-to-alls of the forward return, in their order.
        recomputes: whether it is the recomputation; backwards of a retained graph enter it again.
    """

    def __init__(self, rows: list[torch.Tensor], *, recomputes: bool) -> None:
        self._rows, self._recomputes = rows, recomputes

    def __enter__(self) -> None:
        global _current
        self._before, _current, self._next = _current, self, 0

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._before

    def exchange(self, start: Callable[[], torch.Tensor]) -> torch.Tensor:
        if not self._recomputes:
            self._rows.append(start())
        self._next += 1
        return self._rows[self._next - 1]


_current: _KeptExchanges | None = None


def kept_exchange_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a forward and of its recomputation, as `checkpoint` takes them."""
    rows: list[torch.Tensor] = []
    return _KeptExchanges(rows, recomputes=False), _KeptExchanges(rows, recomputes=True)


def exchanged(start: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Starts an all-to-all, or returns what it returned in the forward that is recomputed.

    Args:
        start: returns the rows that will be received.
    """
    return start() if _current is None else _current.exchange(start)
