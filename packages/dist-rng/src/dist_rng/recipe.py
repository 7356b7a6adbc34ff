"""What a CUDA device does for one distribution and dtype: the same for emulator and kernels."""

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import inf

import torch

from dist_rng.draws import (
    AllIntegers,
    Bernoulli,
    BernoulliTensor,
    Distribution,
    Exponential,
    FusedDropout,
    Integers,
    Normal,
    Uniform,
)
from dist_rng.philox import QUADS, STRIDED, Reach, dropout_reach


class Kind(IntEnum):
    """What is made of the words; the values are ``PhiloxKind``'s in philox_draw.h."""

    UNIFORM = 0
    NORMAL = 1
    EXPONENTIAL = 2
    BERNOULLI = 3  # u < a, in the accumulate type of the scalar
    BERNOULLI_TENSOR = 4  # u <= p, u in fp32
    KEEP = 5  # u < a, u in fp32
    MODULO_32 = 6
    MODULO_64 = 7


class Scalar(IntEnum):
    """Dtype of the elements; the values are those of ``enum class Dtype`` in dtype.h."""

    FLOAT32 = 0
    FLOAT64 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    UINT8 = 4
    INT8 = 5
    INT16 = 6
    INT32 = 7
    INT64 = 8
    BOOL = 9
    UINT16 = 10
    UINT32 = 11
    UINT64 = 12


SCALARS = {getattr(torch, scalar.name.lower()): scalar for scalar in Scalar}
_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
# Bits of the significand, std::numeric_limits<T>::digits.
_DIGITS = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True)
class Recipe:
    """How the words become elements.

    Attributes:
        kind: the formula.
        scalar: dtype of the elements.
        reach: how the kernel's threads reach the elements.
        a: low, mean, rate or threshold.
        b: high or standard deviation.
        modulus: of integers, from 1 to 2**64 - 1.
        base: added to an integer.
    """

    kind: Kind
    scalar: Scalar
    reach: Reach
    a: float = 0.0
    b: float = 0.0
    modulus: int = 1
    base: int = 0


@lru_cache(maxsize=4096)
def recipe_of(draw: Distribution, dtype: torch.dtype, numel: int) -> Recipe:
    """Return how a CUDA device draws ``draw`` into a tensor.

    Args:
        draw: the distribution.
        dtype: of the tensor that is written; the mask's for fused dropout.
        numel: elements of the whole tensor.

    Raises:
        TypeError: torch does not draw this distribution into this dtype.
        ValueError: an argument is out of range.
    """
    if dtype not in SCALARS:
        raise TypeError(f"{_name(draw)} into {dtype}: torch draws no such tensor")
    scalar = SCALARS[dtype]
    floats = STRIDED[2 if dtype == torch.float64 else 4]
    if isinstance(draw, Uniform | Normal | Exponential) and dtype not in _FLOATING:
        raise TypeError(f"{_name(draw)} into {dtype}: it needs a floating-point tensor")
    if not isinstance(draw, Integers) and dtype in _UNSIGNED:
        raise TypeError(f"{_name(draw)} into {dtype}: torch's CUDA kernels lack it; use int64")
    match draw:
        case Uniform(low, high):
            _check_uniform(low, high, dtype)
            return Recipe(Kind.UNIFORM, scalar, floats, low, high)
        case Normal(mean, std):
            _require(std >= 0.0, draw, "a standard deviation of at least 0")
            return Recipe(Kind.NORMAL, scalar, floats, mean, std)
        case Exponential(rate):
            _require(rate > 0.0, draw, "a rate above 0")
            return Recipe(Kind.EXPONENTIAL, scalar, floats, rate)
        case Bernoulli(p):
            _require(0.0 <= p <= 1.0, draw, "a probability in [0, 1]")
            return Recipe(Kind.BERNOULLI, scalar, floats, p)
        case BernoulliTensor():
            return Recipe(Kind.BERNOULLI_TENSOR, scalar, QUADS)
        case FusedDropout(p, itemsize):
            if dtype != torch.bool:
                raise TypeError(f"FusedDropout into {dtype}: its mask is torch.bool")
            _require(0.0 < p < 1.0, draw, "a probability strictly between 0 and 1")
            threshold = _dropout_threshold(p, itemsize)
            return Recipe(Kind.KEEP, scalar, dropout_reach(numel, itemsize), threshold)
        case Integers(low, high):
            return _integers(low, high, dtype)
        case AllIntegers():
            return _all_integers(dtype)


def _dropout_threshold(p: float, itemsize: int) -> float:
    # dropout_cuda compares an fp32 uniform with 1 - p in the input's accumulate type. For fp64
    # inputs u < x of an fp32 u says the same of the smallest fp32 that is not below x.
    keep = 1.0 - p
    rounded = _to_dtype(keep, torch.float32)
    if itemsize == 8 and rounded < keep:
        return float(torch.nextafter(torch.tensor(rounded), torch.tensor(inf)))
    return rounded


def _integers(low: int, high: int, dtype: torch.dtype) -> Recipe:
    draw = Integers(low, high)
    _require(low < high, draw, "low < high")
    if dtype in _FLOATING:
        # random_from_to_impl: bounds that the dtype cannot hold move inwards.
        low, high = _lift(low, dtype), _lower(high, dtype)
        _require(low < high, draw, f"low < high as {dtype}")
        least, largest = int(torch.finfo(dtype).min), int(torch.finfo(dtype).max)
    elif dtype == torch.bool:
        least, largest = 0, 1
    else:
        least, largest = torch.iinfo(dtype).min, min(torch.iinfo(dtype).max, 2**63 - 1)
    _require(least <= low and high - 1 <= largest, draw, f"bounds that {dtype} holds")
    wide = high - low >= 2**28
    kind, unroll = (Kind.MODULO_64, 2) if wide else (Kind.MODULO_32, 4)
    return Recipe(kind, SCALARS[dtype], STRIDED[unroll], modulus=high - low, base=low)


def _all_integers(dtype: torch.dtype) -> Recipe:
    if dtype == torch.bool:
        modulus = 2
    elif dtype in _FLOATING:
        modulus = 2 ** _DIGITS[dtype] + 1
    else:
        modulus = torch.iinfo(dtype).max + 1
    wide = dtype in (torch.float64, torch.int64)
    kind, unroll = (Kind.MODULO_64, 2) if wide else (Kind.MODULO_32, 4)
    return Recipe(kind, SCALARS[dtype], STRIDED[unroll], modulus=modulus)


def _lift(low: int, dtype: torch.dtype) -> int:
    """``update_from`` of aten/src/ATen/native/DistributionTemplates.h."""
    held = int(_to_dtype(low + 1, dtype))
    if held >= low:
        return low
    return held + _spacing(abs(low + 1), dtype)


def _lower(high: int, dtype: torch.dtype) -> int:
    """``update_to`` of aten/src/ATen/native/DistributionTemplates.h."""
    held = int(_to_dtype(high - 1, dtype))
    if held < high:
        return high
    return held - _spacing(abs(high - 1), dtype)


def _spacing(value: int, dtype: torch.dtype) -> int:
    return 1 << (value.bit_length() - 1 - _DIGITS[dtype] + 1)


def _to_dtype(value: float, dtype: torch.dtype) -> float:
    """Round as C++ casts do: to float first for 16-bit types."""
    kind = torch.int64 if isinstance(value, int) else torch.float64
    return float(torch.tensor(value, dtype=kind).to(dtype).double())


def _check_uniform(low: float, high: float, dtype: torch.dtype) -> None:
    draw = Uniform(low, high)
    largest = torch.finfo(dtype).max
    _require(low <= high, draw, "low <= high")
    _require(-largest <= low and high <= largest, draw, f"bounds that {dtype} holds")
    _require(high - low <= largest, draw, f"a range that {dtype} holds")


def _require(holds: bool, draw: Distribution, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{draw}: it takes {wanted}")


def _name(draw: Distribution) -> str:
    return type(draw).__name__
