"""What a reducer knows of the steps to come, and of the one it is in."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from fused_comm.bucket import Bucket, Route
from fused_comm.flat_buffer import FlatBuffer
from fused_comm.flight import Flight

__all__ = ["Step", "StepPlan"]


@dataclass
class StepPlan:
    """Buckets for one choice of axes that stay pending."""

    buckets: list[Bucket] = field(default_factory=list)
    bucket_of: dict[int, int] = field(default_factory=dict)  # by parameter
    largest: dict[Route, int] = field(default_factory=dict)  # elements of its largest bucket
    planned: int = 0  # so many of the known gradients
    held: list[list[FlatBuffer]] = field(default_factory=list)  # per bucket, what gradients are in


@dataclass
class Step:
    """What has happened since the last `finish()`."""

    order: dict[int, None] = field(default_factory=dict)  # parameters, as their gradients came
    backward: int = -1  # autograd's number of the backward that is watched
    ended: bool = False  # a backward that made a gradient of this step is over
    missing: list[int] = field(default_factory=list)  # per bucket, gradients that have not come
    flights: list[Flight] = field(default_factory=list)  # of the buckets, in their order
    again: bool = False  # a gradient came a second time
    rest: bool = False  # of such a step, what came after its bucket was launched

    def watch_backward(self) -> None:
        """Has autograd report the end of the backward that runs now, if one does."""
        current = torch._C._current_graph_task_id()
        if current not in (-1, self.backward):
            self.backward = current
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def warn_if_ended(self) -> bool:
        """Warns of a second backward if the step's first is over; whether it did."""
        if self.ended:
            warnings.warn(
                "GradReducer: a second backward began without finish() after the first, and its "
                "gradients need collectives of their own; call finish() after each backward, or "
                "run all but the last backward of a step within no_sync()",
                stacklevel=2,
            )
        return self.ended

    def _backward_ended(self) -> None:
        # Within a node: of reentrant checkpointing, whose surrounding backward goes on.
        if torch._C._current_autograd_node() is None:
            self.ended = True
