"""Refuses degrees that do not divide a size, with those that would."""

import math
from collections.abc import Iterable

from integration.errors import UsageError
from integration.models import ModelShape

__all__ = ["alternatives", "divisors", "require_divisors"]


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive number, in order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def alternatives(values: Iterable[int]) -> str:
    """Returns values as a clause, as "1, 2 or 4"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def require_divisors(
    shape: ModelShape, fields: Iterable[str], option: str, degree: int, fitting: Iterable[int]
) -> None:
    """Refuses a degree that does not divide all of some sizes of a model.

    Args:
        shape: shape of the model.
        fields: names of its sizes.
        option: option of the degree, as on the command line.
        degree: its value.
        fitting: degrees that the ranks and the other degrees allow, in order.

    Raises:
        UsageError: names the first size that the degree does not divide, and the degrees of
            ``fitting`` that divide all of them.
    """
    sizes = {field: getattr(shape, field) for field in fields}
    for field, size in sizes.items():
        if size % degree:
            common = math.gcd(*sizes.values())
            fit = [each for each in fitting if common % each == 0]
            raise UsageError(
                f"{option} {degree}: expected a divisor of {field} = {size}, got {degree};"
                f" {option} {alternatives(fit)} would fit"
            )
