"""What a CUDA device does for one distribution and dtype: the same for emulator and kernels."""

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import inf

import torch

from dist_rng.bounds import IntegerRange, all_integers, check_arguments, integer_range, rounded
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
    check_arguments(draw, dtype)
    match draw:
        case Uniform(low, high):
            return Recipe(Kind.UNIFORM, scalar, floats, low, high)
        case Normal(mean, std):
            return Recipe(Kind.NORMAL, scalar, floats, mean, std)
        case Exponential(rate):
            return Recipe(Kind.EXPONENTIAL, scalar, floats, rate)
        case Bernoulli(p):
            return Recipe(Kind.BERNOULLI, scalar, floats, p)
        case BernoulliTensor():
            return Recipe(Kind.BERNOULLI_TENSOR, scalar, QUADS)
        case FusedDropout(p, itemsize):
            if dtype != torch.bool:
                raise TypeError(f"FusedDropout into {dtype}: its mask is torch.bool")
            threshold = _dropout_threshold(p, itemsize)
            return Recipe(Kind.KEEP, scalar, dropout_reach(numel, itemsize), threshold)
        case Integers():
            values = integer_range(draw, dtype)
            return _integers(values, scalar, wide=values.modulus >= 2**28)
        case AllIntegers():
            wide = dtype in (torch.float64, torch.int64)
            return _integers(all_integers(dtype), scalar, wide=wide)


def _dropout_threshold(p: float, itemsize: int) -> float:
    # dropout_cuda compares an fp32 uniform with 1 - p in the input's accumulate type. For fp64
    # inputs u < x of an fp32 u says the same of the smallest fp32 that is not below x.
    keep = 1.0 - p
    nearest = rounded(keep, torch.float32)
    if itemsize == 8 and nearest < keep:
        return float(torch.nextafter(torch.tensor(nearest), torch.tensor(inf)))
    return nearest


def _integers(values: IntegerRange, scalar: Scalar, *, wide: bool) -> Recipe:
    kind, unroll = (Kind.MODULO_64, 2) if wide else (Kind.MODULO_32, 4)
    return Recipe(kind, scalar, STRIDED[unroll], modulus=values.modulus, base=values.base)


def _name(draw: Distribution) -> str:
    return type(draw).__name__
