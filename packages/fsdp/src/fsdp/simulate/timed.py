"""Times one model's step, operator by operator: seconds of a flop, of a byte, of a call."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp.simulate.work import Forward, Recorder, Work, work_of

__all__ = ["Timed", "compute_of"]


@dataclass(frozen=True)
class Timed:
    """What a step of one model takes.

    Attributes:
        flop: seconds.
        nbyte: seconds of a byte of operators without flops.
        op: seconds of a call, of all that is not told by the others.
        step: seconds of forward and backward.
    """

    flop: float
    nbyte: float
    op: float
    step: float


def compute_of(
    model: nn.Module, forward: Forward, rounds: int, clock: Callable[[], float]
) -> Timed:
    """Times forward and backward as they are, and once each operator in them.

    Flops and bytes have the times of their operators; the rest of the step is by calls.

    Args:
        model: not sharded; its gradients are as before at the end.
        forward: calls it and returns the loss.
        rounds: of which the median is taken.
        clock: of seconds.
    """
    before = [param.grad for param in model.parameters()]
    times = [_seconds(model, forward, clock) for _ in range(rounds + 1)][1:]
    recorder = _Timer(model, clock)
    with recorder:
        forward(model).backward()
    for param, grad in zip(model.parameters(), before, strict=True):
        param.grad = grad
    return recorder.timed(statistics.median(times))


def _seconds(model: nn.Module, forward: Forward, clock: Callable[[], float]) -> float:
    start = clock()
    forward(model).backward()
    taken = clock() - start
    for param in model.parameters():
        param.grad = None
    return taken


class _Timer(Recorder):
    """Times operators beside counting them."""

    def __init__(self, model: nn.Module, clock: Callable[[], float]) -> None:
        super().__init__(model)
        self._clock = clock
        self._total, self._products, self._others = Work(), 0.0, 0.0

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator, timed."""
        start = self._clock()
        out = func(*args, **kwargs)
        taken = self._clock() - start
        work = work_of(func, args, kwargs, out)
        self._total += work
        if work.flops:
            self._products += taken
        elif work.nbytes:
            self._others += taken
        return out

    def timed(self, step: float) -> Timed:
        """What a flop and a byte took, scaled down if they took more than the step."""
        told = self._products + self._others
        scale = min(1.0, step / told)
        flop = scale * self._products / max(self._total.flops, 1)
        nbyte = scale * self._others / max(self._total.nbytes, 1)
        return Timed(flop, nbyte, max(0.0, step - told) / max(self._total.ops, 1), step)
