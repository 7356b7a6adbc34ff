"""Computes the deviation of one loss curve from another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Deviation:
    """The deviation of a curve from the reference, in units of the loss.

    Attributes:
        differences: |loss - reference| of every step; not finite where either loss is not.
        maximum: largest difference; NaN if any is NaN.
        step: first step with the largest difference, counted from 1.
        mean: mean difference.
    """

    differences: tuple[float, ...]
    maximum: float
    step: int
    mean: float

    @property
    def bitwise_equal(self) -> bool:
        """Whether the two curves are equal at every step."""
        return self.maximum == 0.0

    def within(self, tolerance: float) -> bool:
        """Returns whether no difference exceeds ``tolerance``; NaN exceeds any."""
        return self.maximum <= tolerance


def deviation(losses: Sequence[float], reference: Sequence[float]) -> Deviation:
    """Returns the deviation of ``losses`` from ``reference``.

    Raises:
        ValueError: the curves are empty or differ in length.
    """
    if not losses or len(losses) != len(reference):
        raise ValueError(
            "deviation: expected two curves of the same number of steps, at least one, got"
            f" {len(losses)} and {len(reference)}; compare runs with equal --steps"
        )
    differences = tuple(abs(a - b) for a, b in zip(losses, reference, strict=True))
    # NaN counts as the largest: max() alone would ignore it.
    worst = max(
        range(len(differences)),
        key=lambda index: (math.isnan(differences[index]), differences[index], -index),
    )
    return Deviation(
        differences=differences,
        maximum=differences[worst],
        step=worst + 1,
        mean=math.fsum(differences) / len(differences)
        if all(map(math.isfinite, differences))
        else math.nan,
    )
