"""What a reducer knows of the steps to come, and of the one it is in."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    missing: list[int] = field(default_factory=list)  # per bucket, gradients that have not come
    flights: list[Flight] = field(default_factory=list)  # of the buckets, in their order
    again: bool = False  # a gradient came a second time
    rest: bool = False  # of such a step, what came after its bucket was launched
