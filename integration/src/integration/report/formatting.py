"""Numbers and phrases that the sections of the report share."""

import math
from collections.abc import Sequence

from integration.compare.deviation import Deviation
from integration.models import model_shape

ABSENT = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


def scientific(value: float) -> str:
    """Return a number in few digits, a small one by its power of ten: 0, 0.5, 1e-4, nan."""
    if value == 0 or value >= 0.01 or not math.isfinite(value):
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def mebibytes(count: float) -> str:
    """Return a number of bytes in MiB, a small one with its first digits."""
    value = count / 2**20
    return f"{value:,.0f} MiB" if value >= 10 else f"{value:.2g} MiB"


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def size(parameters: int) -> str:
    """Return a model's size as it follows the model's name."""
    return f" ({parameters / 1e6:.1f} M parameters)"


def loss_unit(model: str) -> str:
    """Return what a model's loss counts."""
    return model_shape(model).loss_unit


def out_of_tolerance(
    name: str, found: Deviation, tolerance: float, unit: str = "nats per token"
) -> str:
    """Return the sentence on a run whose losses, in such a unit, are too far off."""
    if math.isnan(found.maximum):
        return f"{name} has no finite loss to compare from step {found.step} on."
    return (
        f"{name} leaves its tolerance: it differs by {scientific(found.maximum)} {unit}"
        f" at step {found.step}, where {scientific(tolerance)} is accepted."
    )
