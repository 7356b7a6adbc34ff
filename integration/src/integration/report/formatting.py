"""Formats numbers and phrases of the report."""

import math
from collections.abc import Sequence

from integration.models import model_shape

ABSENT = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


def scientific(value: float) -> str:
    """Returns a number with few digits, small ones in scientific notation: 0, 0.5, 1e-4, nan."""
    if value == 0 or value >= 0.01 or not math.isfinite(value):
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def mebibytes(count: float) -> str:
    """Returns a number of bytes in MiB, small ones with two digits, and few of them as they are."""
    value = count / 2**20
    if count < 2**10:
        return f"{count:.0f} B"
    return f"{value:,.0f} MiB" if value >= 10 else f"{value:.2g} MiB"


def listed(names: Sequence[str]) -> str:
    """Returns names joined by commas and "and"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def size(parameters: int) -> str:
    """Returns a model's number of parameters in parentheses, to follow its name."""
    return f" ({parameters / 1e6:.1f} M parameters)"


def loss_unit(model: str) -> str:
    """Returns the unit of a model's loss."""
    return model_shape(model).loss_unit
