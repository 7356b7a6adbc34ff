"""The distributions that can be drawn, their arguments and the checks of them.

They are the same for every backend. A backend takes ``(local, region, distribution, generator)``
and fills ``local`` with what one device would have drawn there. The arguments have torch's names.

The ranges of integers are ATen's: ``check_from_to_in_range``, ``update_from``, ``update_to`` and
``random_from`` of aten/src/ATen/native/DistributionTemplates.h.
"""

from dataclasses import dataclass

import torch

# Bits of the significand, std::numeric_limits<T>::digits.
_DIGITS = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True)
class Uniform:
    """``Tensor.uniform_(low, high)``; floating point."""

    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Normal:
    """``Tensor.normal_(mean, std)``; floating point."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Bernoulli:
    """``Tensor.bernoulli_(p)`` with one probability; every dtype."""

    p: float = 0.5


@dataclass(frozen=True)
class BernoulliTensor:
    """``torch.bernoulli(probabilities)`` and ``Tensor.bernoulli_(probabilities)``.

    The backend takes the local probabilities as a second tensor: same region, floating point.
    """


@dataclass(frozen=True)
class Exponential:
    """``Tensor.exponential_(rate)``; floating point."""

    rate: float = 1.0


@dataclass(frozen=True)
class Cauchy:
    """``Tensor.cauchy_(median, sigma)``; floating point, on CPUs."""

    median: float = 0.0
    sigma: float = 1.0


@dataclass(frozen=True)
class Geometric:
    """``Tensor.geometric_(p)``; every dtype but bool, on CPUs."""

    p: float = 0.5


@dataclass(frozen=True)
class LogNormal:
    """``Tensor.log_normal_(mean, std)``; floating point, on CPUs."""

    mean: float = 1.0
    std: float = 2.0


@dataclass(frozen=True)
class Integers:
    """``Tensor.random_(low, high)`` and ``torch.randint(low, high)``: ``low <= x < high``."""

    low: int
    high: int


@dataclass(frozen=True)
class AllIntegers:
    """``Tensor.random_()``: every value that the dtype represents exactly and is >= 0."""


@dataclass(frozen=True)
class FusedDropout:
    """``native_dropout(input, p)`` on CUDA: one mask element per input element.

    CPUs, and in-place dropout, draw a ``Bernoulli`` mask instead.

    Attributes:
        p: the probability of a zero.
        input_itemsize: bytes per element of the input, on which the kernel's access pattern
            depends; the local tensor that is filled is the mask.
    """

    p: float = 0.5
    input_itemsize: int = 4


Distribution = (
    Uniform
    | Normal
    | Bernoulli
    | BernoulliTensor
    | Exponential
    | Cauchy
    | Geometric
    | LogNormal
    | Integers
    | AllIntegers
    | FusedDropout
)


@dataclass(frozen=True)
class IntegerRange:
    """The integers ``base <= x < base + modulus``.

    Attributes:
        base: the smallest of them.
        modulus: how many there are, from 1 to 2**64 - 1.
    """

    base: int
    modulus: int


def check_arguments(draw: Distribution, dtype: torch.dtype) -> None:
    """Checks the arguments that torch checks; ``integer_range`` checks those of ``Integers``.

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
            _require(-largest <= low and high <= largest, draw, f"bounds that {dtype} represents")
            _require(high - low <= largest, draw, f"a range that {dtype} represents")
        case Normal(_, std):
            _require(std >= 0.0, draw, "a standard deviation of at least 0")
        case Exponential(rate):
            _require(rate > 0.0, draw, "a rate above 0")
        case Cauchy(_, sigma):
            _require(sigma > 0.0, draw, "a sigma above 0")
        case Geometric(p):
            _require(0.0 < p < 1.0, draw, "a probability above 0 and below 1")
        case LogNormal(_, std):
            _require(std > 0.0, draw, "a standard deviation above 0")
        case Bernoulli(p):
            _require(0.0 <= p <= 1.0, draw, "a probability in [0, 1]")
        case FusedDropout(p, _):
            # CUDA's native_dropout returns before the kernel where p is 1.
            _require(0.0 <= p < 1.0, draw, "a probability of at least 0 and below 1")
        case _:
            pass


def integer_range(draw: Integers, dtype: torch.dtype) -> IntegerRange:
    """Returns the integers that ``Tensor.random_(low, high)`` draws from for a tensor of ``dtype``.

    Raises:
        ValueError: there is no such integer, or ``dtype`` does not represent a bound.
    """
    low, high = draw.low, draw.high
    _require(low < high, draw, "low < high")
    if dtype in _DIGITS:
        # Bounds that the dtype does not represent move inwards.
        low, high = _raise_low(low, dtype), _lower_high(high, dtype)
        _require(low < high, draw, f"low < high as {dtype}")
        least, largest = int(torch.finfo(dtype).min), int(torch.finfo(dtype).max)
    elif dtype == torch.bool:
        least, largest = 0, 1
    else:
        least, largest = torch.iinfo(dtype).min, min(torch.iinfo(dtype).max, 2**63 - 1)
    _require(least <= low and high - 1 <= largest, draw, f"bounds that {dtype} represents")
    _require(high - low < 2**64, draw, "fewer than 2**64 integers")
    return IntegerRange(base=low, modulus=high - low)


def all_integers(dtype: torch.dtype) -> IntegerRange:
    """Returns the integers that ``Tensor.random_()`` draws from: 0 to the largest of ``dtype``."""
    return IntegerRange(base=0, modulus=largest_integer(dtype) + 1)


def largest_integer(dtype: torch.dtype) -> int:
    """Returns the largest integer of ``Tensor.random_()`` and ``Tensor.random_(low, None)``.

    For floats this is the last of the consecutive integers that ``dtype`` represents.
    """
    if dtype in _DIGITS:
        return int(2 ** _DIGITS[dtype])
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _raise_low(low: int, dtype: torch.dtype) -> int:
    """ATen's ``update_from``."""
    represented = int(rounded(low + 1, dtype))
    if represented >= low:
        return low
    return represented + _spacing(abs(low + 1), dtype)


def _lower_high(high: int, dtype: torch.dtype) -> int:
    """ATen's ``update_to``."""
    represented = int(rounded(high - 1, dtype))
    if represented < high:
        return high
    return represented - _spacing(abs(high - 1), dtype)


def _spacing(value: int, dtype: torch.dtype) -> int:
    return 1 << (value.bit_length() - 1 - _DIGITS[dtype] + 1)


def rounded(value: float, dtype: torch.dtype) -> float:
    """Rounds as C++ casts do: to float first for 16-bit types."""
    kind = torch.int64 if isinstance(value, int) else torch.float64
    return float(torch.tensor(value, dtype=kind).to(dtype).double())


def _require(valid: bool, draw: Distribution, expected: str) -> None:
    if not valid:
        raise ValueError(f"expected {expected}, got {draw}")
