"""What the modules under one root share: streams, order, reductions in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fsdp.prefetch import Order
from fsdp.streams import Streams

if TYPE_CHECKING:
    from fsdp.group import Group
    from fsdp.state import State

__all__ = ["Context"]


class Context:
    """Shared by all states under a root, once the root's first forward has found them.

    Attributes:
        all_states: the root's first, then in the order of modules. (torch's pipeline schedules
            read this name.)
        order: of forwards and backwards.
        running_root: whose forward runs.
        is_last_backward: whether the next backward ends the accumulation.
        ends_by_hand: whether no backward does, but a call of ``finalize_backward``.
        callback_queued: whether the end of this backward will be noticed.
        post_optim_event: that gathers wait for, in place of the current stream.
        most_in_flight: reductions whose buffers are not given back yet.
    """

    def __init__(self, device: torch.device) -> None:
        self.all_states: list[State] = []
        self.streams = Streams(device)
        self.order: Order[State] = Order()
        self.running_root: State | None = None
        self.is_last_backward = True
        self.ends_by_hand = False
        self.callback_queued = False
        self.post_optim_event: Any = None
        self.most_in_flight = 1
        self._in_flight: list[Group] = []

    def post_backward(self, group: Group) -> None:
        """Reduces a group's gradients, after all memory that others can do without was given back.

        A step has most in use about here, so parameters and the buffer of the reduction before
        are given back first, and the gradients' own buffer is taken last.
        """
        if group.reshard_after_backward:
            group.reshard()
        self._leave_in_flight(self.most_in_flight - 1)
        group.reducer.take()
        group.reducer.reduce()
        if group.reducer.under_way:
            self._in_flight.append(group)

    def finish_reductions(self) -> None:
        """Ends all reductions."""
        self._leave_in_flight(0)

    def _leave_in_flight(self, count: int) -> None:
        while len(self._in_flight) > count:
            self._in_flight.pop(0).reducer.finish()

    def drop(self) -> None:
        """Forgets an iteration that failed."""
        self._in_flight.clear()
        self.order.begin_forward()
        self.order.end_forward()
        self.order.end_backward()
        self.running_root, self.callback_queued = None, False
