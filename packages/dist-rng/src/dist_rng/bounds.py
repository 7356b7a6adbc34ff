"""What the arguments of a draw may be, and which integers it draws from: the same on all devices.

Integers are ATen's: ``check_from_to_in_range``, ``update_from``, ``update_to`` and ``random_from``
of aten/src/ATen/native/DistributionTemplates.h.
"""

from dataclasses import dataclass

import torch

from dist_rng.draws import (
    Bernoulli,
    Distribution,
    Exponential,
    FusedDropout,
    Integers,
    Normal,
    Uniform,
)

# Bits of the significand, std::numeric_limits<T>::digits.
_DIGITS = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True)
class IntegerRange:
    """The integers ``base <= x < base + modulus``.

    Attributes:
        base: the least of them.
        modulus: how many there are, from 1 to 2**64 - 1.
    """

    base: int
    modulus: int


def check_arguments(draw: Distribution, dtype: torch.dtype) -> None:
    """Refuse arguments that torch refuses; those of ``Integers`` are ``integer_range``'s.

    Args:
        draw: the distribution.
        dtype: of the tensor that is written; floating point for ``Uniform``.

    Raises:
        ValueError: an argument is out of range.
    """
    match draw:
        case Uniform(low, high):
            largest = torch.finfo(dtype).max
            _require(low <= high, draw, "low <= high")
            _require(-largest <= low and high <= largest, draw, f"bounds that {dtype} holds")
            _require(high - low <= largest, draw, f"a range that {dtype} holds")
        case Normal(_, std):
            _require(std >= 0.0, draw, "a standard deviation of at least 0")
        case Exponential(rate):
            _require(rate > 0.0, draw, "a rate above 0")
        case Bernoulli(p):
            _require(0.0 <= p <= 1.0, draw, "a probability in [0, 1]")
        case FusedDropout(p, _):
            # CUDA's native_dropout returns before the kernel where p is 1.
            _require(0.0 <= p < 1.0, draw, "a probability of at least 0 and below 1")
        case _:
            pass


def integer_range(draw: Integers, dtype: torch.dtype) -> IntegerRange:
    """Return what ``Tensor.random_(low, high)`` draws from, for a tensor of ``dtype``.

    Raises:
        ValueError: there is no such integer, or ``dtype`` does not hold a bound.
    """
    low, high = draw.low, draw.high
    _require(low < high, draw, "low < high")
    if dtype in _DIGITS:
        # Bounds that the dtype cannot hold move inwards.
        low, high = _lift(low, dtype), _lower(high, dtype)
        _require(low < high, draw, f"low < high as {dtype}")
        least, largest = int(torch.finfo(dtype).min), int(torch.finfo(dtype).max)
    elif dtype == torch.bool:
        least, largest = 0, 1
    else:
        least, largest = torch.iinfo(dtype).min, min(torch.iinfo(dtype).max, 2**63 - 1)
    _require(least <= low and high - 1 <= largest, draw, f"bounds that {dtype} holds")
    _require(high - low < 2**64, draw, "fewer than 2**64 integers: a higher low")
    return IntegerRange(base=low, modulus=high - low)


def all_integers(dtype: torch.dtype) -> IntegerRange:
    """Return what ``Tensor.random_()`` draws from: 0 to the largest that ``dtype`` represents."""
    return IntegerRange(base=0, modulus=largest_integer(dtype) + 1)


def largest_integer(dtype: torch.dtype) -> int:
    """Return where ``Tensor.random_()`` and ``Tensor.random_(low, None)`` end, inclusive.

    For floats that is the end of the integers without gaps.
    """
    if dtype in _DIGITS:
        return int(2 ** _DIGITS[dtype])
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _lift(low: int, dtype: torch.dtype) -> int:
    """``update_from``."""
    held = int(rounded(low + 1, dtype))
    if held >= low:
        return low
    return held + _spacing(abs(low + 1), dtype)


def _lower(high: int, dtype: torch.dtype) -> int:
    """``update_to``."""
    held = int(rounded(high - 1, dtype))
    if held < high:
        return high
    return held - _spacing(abs(high - 1), dtype)


def _spacing(value: int, dtype: torch.dtype) -> int:
    return 1 << (value.bit_length() - 1 - _DIGITS[dtype] + 1)


def rounded(value: float, dtype: torch.dtype) -> float:
    """Round as C++ casts do: to float first for 16-bit types."""
    kind = torch.int64 if isinstance(value, int) else torch.float64
    return float(torch.tensor(value, dtype=kind).to(dtype).double())


def _require(holds: bool, draw: Distribution, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{draw}: it takes {wanted}")
