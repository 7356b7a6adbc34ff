"""The Python reference of the compiled Philox4x32 and of the formulas that make elements of it.

It is slow and meant for tests, which compare it with ``src/cpp/philox/philox.h`` and
``src/cpp/philox/formulas.h``. Integers, masks and uniforms are exact; normal and exponential are
computed in double precision without the device's approximations.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11).
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from dist_rng.philox.kernel_spec import KernelSpec, PhiloxKind, Scalar
from dist_rng.philox.launches import WORDS_PER_CALL, WordSource

Words = tuple[int, ...]  # four of a counter or a call, two of a key

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def words(seed: int, offset: int, source: WordSource) -> Words:
    """Returns the four words of a call of cuRAND's ``curandStatePhilox4_32_10_t``.

    Args:
        seed: the generator's seed, 64 bits.
        offset: the generator's offset at this launch; a multiple of 4.
        source: the thread and the call; the lane is not used.
    """
    count = offset // WORDS_PER_CALL + source.call
    counter = (count & _MASK, count >> 32 & _MASK, source.thread & _MASK, source.thread >> 32)
    return philox4x32(counter, (seed & _MASK, seed >> 32))


def philox4x32(counter: Words, key: Words, rounds: int = 10) -> Words:
    """Returns Philox4x32 of a counter: 10 rounds in cuRAND, 7 in flash attention."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & _MASK,
            (first >> 32) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: bits of the significand, and the smallest exponent."""

    digits: int
    smallest_exponent: int


FORMATS = {
    Scalar.FLOAT64: FloatFormat(53, -1074),
    Scalar.FLOAT32: FloatFormat(24, -149),
    Scalar.BFLOAT16: FloatFormat(8, -133),
    Scalar.FLOAT16: FloatFormat(11, -24),
}
_FLOAT32, _FLOAT64 = FORMATS[Scalar.FLOAT32], FORMATS[Scalar.FLOAT64]


def value_of(spec: KernelSpec, words: Words, lane: int, probability: float = 0.0) -> float | int:
    """Returns the element that is made from lane ``lane`` of a call.

    Args:
        spec: the kernel.
        words: the four words of the call.
        lane: from 0 to ``spec.access.unroll - 1``, or 3.
        probability: of the element, for Bernoulli of a tensor.
    """
    double = spec.scalar == Scalar.FLOAT64
    wide = _FLOAT64 if double else _FLOAT32
    match spec.kind:
        case PhiloxKind.UNIFORM:
            return _uniform(spec, _unit(words, lane, double), wide)
        case PhiloxKind.NORMAL:
            normal = _normal(words, lane, double)
            return float(_to(spec.scalar, spec.a + spec.b * normal))
        case PhiloxKind.EXPONENTIAL:
            u = float(_unit(words, lane, double))
            half_epsilon = 2.0**-53 if double else 2.0**-24
            logarithm = -half_epsilon if u >= 1.0 - half_epsilon else math.log(u)
            return float(_to(spec.scalar, -logarithm / spec.a))
        case PhiloxKind.BERNOULLI:
            return int(_unit(words, lane, double) < _round(Fraction(spec.a), wide))
        case PhiloxKind.BERNOULLI_TENSOR:
            return int(_unit(words, lane, False) <= _round(Fraction(probability), wide))
        case PhiloxKind.DROPOUT_MASK:
            return int(_unit(words, lane, False) < _round(Fraction(spec.a), _FLOAT32))
        case PhiloxKind.MODULO_32:
            return _integer(spec, words[lane])
        case PhiloxKind.MODULO_64:
            return _integer(spec, words[2 * lane] << 32 | words[2 * lane + 1])


def _unit(words: Words, lane: int, double: bool) -> Fraction:
    """Returns a number in (0, 1]."""
    if double:
        return _unit_53(words[2 * lane], words[2 * lane + 1])
    word = _round(Fraction(words[lane]), _FLOAT32)
    return _round(word / 2**32 + Fraction(1, 2**33), _FLOAT32)


def _unit_53(low: int, high: int) -> Fraction:
    return _round(Fraction(low ^ high << 21, 2**53) + Fraction(1, 2**54), _FLOAT64)


def _uniform(spec: KernelSpec, unit: Fraction, wide: FloatFormat) -> float:
    low, high = (_to(spec.scalar, bound) for bound in (spec.a, spec.b))
    width = _to(spec.scalar, float(_round(high - low, wide)))
    drawn = _to_format(spec.scalar, _round(unit * width + low, wide))
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


def _integer(spec: KernelSpec, word: int) -> float | int:
    drawn = word % spec.modulus + spec.base
    if spec.scalar in FORMATS:
        return float(_to_format(spec.scalar, _rounded_first(spec.scalar, Fraction(drawn))))
    return drawn


def _to(scalar: Scalar, value: float) -> Fraction:
    """Converts a double as ``static_cast`` does: to float first for 16-bit types."""
    return _to_format(scalar, _rounded_first(scalar, Fraction(value)))


def _rounded_first(scalar: Scalar, value: Fraction) -> Fraction:
    return value if scalar == Scalar.FLOAT64 else _round(value, _FLOAT32)


def _to_format(scalar: Scalar, value: Fraction) -> Fraction:
    return _round(value, FORMATS[scalar])


def _round(value: Fraction, into: FloatFormat) -> Fraction:
    """Rounds to nearest, ties to even; infinities are not needed here."""
    if value == 0:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < _power(exponent):
        exponent -= 1
    last = _power(max(exponent - into.digits + 1, into.smallest_exponent))
    return round(value / last) * last


def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent
