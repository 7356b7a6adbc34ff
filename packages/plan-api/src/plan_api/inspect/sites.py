"""Finds the site of what runs, forward and backward.

Autograd numbers its nodes as forward creates them, and says which node runs. So it is enough to
remember from which number on which module was the innermost one: nothing is done per node, and
nodes of functions that dispatch no operator are found as well.
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

__all__ = ["Origin", "SiteTracker"]

_ACCUMULATE_GRAD = "AccumulateGrad"


@dataclass(frozen=True)
class Origin:
    """The module, and the reason, for which something runs.

    Attributes:
        site: see `plan_api.inspect.track.events`.
        cause: why it runs.
        param: the name of the parameter whose gradient is being accumulated.
    """

    site: str | None = None
    cause: CommunicationCause | None = None
    param: str = ""


class SiteTracker:
    """Tracks modules and causes as they begin and end.

    Nodes are numbered per thread: those that other threads create cannot be told from this
    thread's, which happens under reentrant checkpointing on a GPU only.

    Args:
        model: the model whose parameters are named.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._thread = threading.get_ident()
        self._stack = [Origin()]
        self._first_nodes: list[int] = []  # the number of the first node
        self._origins: list[Origin] = []  # that belongs to each of these
        self._record_origin()

    @property
    def depth(self) -> int:
        """The number of modules and causes that have begun and not ended."""
        return len(self._stack)

    def enter(self, site: str) -> None:
        """Begins a module."""
        self._stack.append(Origin(site))
        self._record_origin()

    def leave(self, depth: int) -> None:
        """Ends the module that began at a depth, and all in it that raised before their end."""
        del self._stack[depth:]
        self._record_origin()

    @contextmanager
    def watch(self, cause: CommunicationCause) -> Iterator[None]:
        """Tracks a cause; a watcher for `plan_api.runtime.attribution`."""
        depth = self.depth
        self._stack.append(Origin(self._stack[-1].site, cause))
        self._record_origin()
        try:
            yield
        finally:
            self.leave(depth)

    def current(self) -> Origin:
        """Returns the origin of what runs now."""
        top = self._stack[-1]
        if top.cause is not None and top.cause.param is not None:
            return self._origin_of_gradient(top.cause.param, top.cause)
        node: Any = torch._C._current_autograd_node()  # None between nodes
        if node is None:
            return top
        if node.name().endswith(_ACCUMULATE_GRAD):
            return self._origin_of_gradient(node.variable, top.cause)
        if top.site is not None:  # recomputation
            return top
        forward = self._origin_of_node(node._sequence_nr())
        return Origin(forward.site, top.cause or _backward_cause(forward.cause))

    def _origin_of_gradient(self, param: torch.Tensor, cause: CommunicationCause | None) -> Origin:
        name = self._names.get(id(param), "")
        return Origin(name.rpartition(".")[0] if name else None, cause, name)

    def _origin_of_node(self, number: int) -> Origin:
        found = bisect_right(self._first_nodes, number) - 1
        return self._origins[found] if found >= 0 else Origin()

    def _record_origin(self) -> None:
        if threading.get_ident() == self._thread:
            self._first_nodes.append(torch.autograd._get_sequence_nr())
            self._origins.append(self._stack[-1])


def _backward_cause(cause: CommunicationCause | None) -> CommunicationCause | None:
    """Returns the cause without placements, as the gradient's are others than the tensor's."""
    return None if cause is None else replace(cause, before=(), after=())
