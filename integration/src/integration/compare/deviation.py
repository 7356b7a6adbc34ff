"""How far one loss curve lies from another: numbers only, no files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Deviation:
    """The distance of a curve from the reference, in units of the loss.

    Attributes:
        differences: |loss - reference| of every step; not finite where either loss is not.
        maximum: the largest of them; NaN when any is NaN.
        step: where ``maximum`` occurs first, counted from 1.
        mean: their mean.
    """

    differences: tuple[float, ...]
    maximum: float
    step: int
    mean: float

    @property
    def bitwise_equal(self) -> bool:
        """Whether the two curves are the same numbers."""
        return self.maximum == 0.0

    def within(self, tolerance: float) -> bool:
        """Whether no difference exceeds ``tolerance``; a NaN does."""
        return self.maximum <= tolerance


def deviation(losses: Sequence[float], reference: Sequence[float]) -> Deviation:
    """Return the distance of ``losses`` from ``reference``, step by step.

    Raises:
        ValueError: the curves are empty or differ in length.
    """
    if not losses or len(losses) != len(reference):
        raise ValueError(
            f"curves of {len(losses)} and {len(reference)} steps cannot be compared;"
            " both need the same steps, and at least one"
        )
    differences = tuple(abs(a - b) for a, b in zip(losses, reference, strict=True))
    # A NaN outweighs everything: max() alone would pass over it.
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
