"""Where in a model something runs, forward and backward.

Autograd numbers its nodes as forward makes them, and tells which node runs. So it is enough to
remember from which number on which module was the innermost one: nothing is done per node, and
nodes of functions that dispatch nothing are found as well.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from plan_api.runtime.attribution import CommunicationCause

__all__ = ["Origin", "Sites"]

_LEAF = "AccumulateGrad"


@dataclass(frozen=True)
class Origin:
    """What something belongs to.

    Attributes:
        site: see `plan_api.track.events`.
        cause: why it runs.
        param: the name of the parameter whose gradient arrives now.
    """

    site: str | None = None
    cause: CommunicationCause | None = None
    param: str = ""


class Sites:
    """Follows modules and causes as they begin and end.

    Nodes are numbered per thread: those made by other threads than this are not told from this
    one's, which only happens under reentrant checkpointing on a GPU.

    Args:
        model: whose parameters are named.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._thread = threading.get_ident()
        self._stack = [Origin()]
        self._starts: list[int] = []  # of nodes, by number,
        self._origins: list[Origin] = []  # and what those from there on belong to
        self._changed()

    @property
    def depth(self) -> int:
        """How much has begun and not ended."""
        return len(self._stack)

    def enter(self, site: str) -> None:
        """A module begins."""
        self._stack.append(Origin(site))
        self._changed()

    def leave(self, depth: int) -> None:
        """It ends; what began after it has raised, if it did not end."""
        del self._stack[depth:]
        self._changed()

    @contextmanager
    def because(self, cause: CommunicationCause) -> Iterator[None]:
        """A watcher for `plan_api.runtime.attribution`."""
        depth = self.depth
        self._stack.append(Origin(self._stack[-1].site, cause))
        self._changed()
        try:
            yield
        finally:
            self.leave(depth)

    def now(self) -> Origin:
        """What runs now belongs to this."""
        top = self._stack[-1]
        if top.cause is not None and top.cause.param is not None:
            return self._of_gradient(top.cause.param, top.cause)
        node: Any = torch._C._current_autograd_node()  # None between nodes
        if node is None:
            return top
        if node.name().endswith(_LEAF):
            return self._of_gradient(node.variable, top.cause)
        if top.site is not None:  # computed again
            return top
        made = self._made_at(node._sequence_nr())
        return Origin(made.site, top.cause or _on_the_way_back(made.cause))

    def _of_gradient(self, param: torch.Tensor, cause: CommunicationCause | None) -> Origin:
        name = self._names.get(id(param), "")
        return Origin(name.rpartition(".")[0] if name else None, cause, name)

    def _made_at(self, number: int) -> Origin:
        found = bisect_right(self._starts, number) - 1
        return self._origins[found] if found >= 0 else Origin()

    def _changed(self) -> None:
        if threading.get_ident() == self._thread:
            self._starts.append(torch.autograd._get_sequence_nr())
            self._origins.append(self._stack[-1])


def _on_the_way_back(cause: CommunicationCause | None) -> CommunicationCause | None:
    """The gradient's placements are not those of what was moved."""
    return None if cause is None else replace(cause, before=(), after=())
