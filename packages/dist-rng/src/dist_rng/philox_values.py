"""From the words of a call to an element, in exact arithmetic: what the compiled code must equal.

Slow, and meant for tests: ``src/cpp/philox_values.h`` is the same by formula. Integers, masks and
uniforms are exact; normal and exponential are computed in double precision without the device's
approximations.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from dist_rng.philox import Words
from dist_rng.recipe import Kind, Recipe, Scalar


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: bits of the significand, and the least exponent."""

    digits: int
    least: int


FORMATS = {
    Scalar.FLOAT64: Format(53, -1074),
    Scalar.FLOAT32: Format(24, -149),
    Scalar.BFLOAT16: Format(8, -133),
    Scalar.FLOAT16: Format(11, -24),
}
_FLOAT32, _FLOAT64 = FORMATS[Scalar.FLOAT32], FORMATS[Scalar.FLOAT64]


def value_of(recipe: Recipe, words: Words, lane: int, probability: float = 0.0) -> float | int:
    """Return the element that lane ``lane`` of a call makes.

    Args:
        recipe: what is drawn, into which dtype.
        words: the four words of the call.
        lane: from 0 to ``recipe.reach.unroll - 1``, or 3.
        probability: the element's own, for Bernoulli of a tensor.
    """
    double = recipe.scalar == Scalar.FLOAT64
    wide = _FLOAT64 if double else _FLOAT32
    match recipe.kind:
        case Kind.UNIFORM:
            return _uniform(recipe, _unit(words, lane, double), wide)
        case Kind.NORMAL:
            normal = _normal(words, lane, double)
            return float(_to(recipe.scalar, recipe.a + recipe.b * normal))
        case Kind.EXPONENTIAL:
            u = float(_unit(words, lane, double))
            half_epsilon = 2.0**-53 if double else 2.0**-24
            logarithm = -half_epsilon if u >= 1.0 - half_epsilon else math.log(u)
            return float(_to(recipe.scalar, -logarithm / recipe.a))
        case Kind.BERNOULLI:
            return int(_unit(words, lane, double) < _round(Fraction(recipe.a), wide))
        case Kind.BERNOULLI_TENSOR:
            return int(_unit(words, lane, False) <= _round(Fraction(probability), wide))
        case Kind.KEEP:
            return int(_unit(words, lane, False) < _round(Fraction(recipe.a), _FLOAT32))
        case Kind.MODULO_32:
            return _integer(recipe, words[lane])
        case Kind.MODULO_64:
            return _integer(recipe, words[2 * lane] << 32 | words[2 * lane + 1])


def _unit(words: Words, lane: int, double: bool) -> Fraction:
    """A number in (0, 1]."""
    if double:
        return _unit_53(words[2 * lane], words[2 * lane + 1])
    word = _round(Fraction(words[lane]), _FLOAT32)
    return _round(word / 2**32 + Fraction(1, 2**33), _FLOAT32)


def _unit_53(low: int, high: int) -> Fraction:
    return _round(Fraction(low ^ high << 21, 2**53) + Fraction(1, 2**54), _FLOAT64)


def _uniform(recipe: Recipe, unit: Fraction, wide: Format) -> float:
    low, high = (_to(recipe.scalar, bound) for bound in (recipe.a, recipe.b))
    width = _to(recipe.scalar, float(_round(high - low, wide)))
    drawn = _to_format(recipe.scalar, _round(unit * width + low, wide))
    return float(low if drawn == high else drawn)


def _normal(words: Words, lane: int, double: bool) -> float:
    if double:
        radius_unit = float(_unit_53(words[0], words[1]))
        turn = float(_unit_53(words[2], words[3]))
    else:
        first, second = words[lane & 2], words[lane & 2 | 1]
        radius_unit = float(_unit((first, 0, 0, 0), 0, False))
        turn = (second + 0.5) / 2**32
    angle = 2.0 * math.pi * turn
    radius = math.sqrt(-2.0 * math.log(radius_unit))
    return radius * (math.cos(angle) if lane & 1 else math.sin(angle))


def _integer(recipe: Recipe, word: int) -> float | int:
    drawn = word % recipe.modulus + recipe.base
    if recipe.scalar in FORMATS:
        return float(_to_format(recipe.scalar, _rounded_first(recipe.scalar, Fraction(drawn))))
    return drawn


def _to(scalar: Scalar, value: float) -> Fraction:
    """``static_cast`` of a double: to float first for 16-bit types."""
    return _to_format(scalar, _rounded_first(scalar, Fraction(value)))


def _rounded_first(scalar: Scalar, value: Fraction) -> Fraction:
    return value if scalar == Scalar.FLOAT64 else _round(value, _FLOAT32)


def _to_format(scalar: Scalar, value: Fraction) -> Fraction:
    return _round(value, FORMATS[scalar])


def _round(value: Fraction, into: Format) -> Fraction:
    """Round to nearest, ties to even; infinities are not needed here."""
    if value == 0:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < _power(exponent):
        exponent -= 1
    last = _power(max(exponent - into.digits + 1, into.least))
    return round(value / last) * last


def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent
