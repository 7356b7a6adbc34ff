"""The kernel with which a CUDA device draws a distribution into a dtype.

The emulator and the CUDA kernels both take it.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import inf

import torch
from torch import Tensor

from dist_rng.distributions import (
    AllIntegers,
    Bernoulli,
    BernoulliTensor,
    Cauchy,
    Distribution,
    Exponential,
    FusedDropout,
    Geometric,
    IntegerRange,
    Integers,
    LogNormal,
    Normal,
    Uniform,
    all_integers,
    check_arguments,
    integer_range,
    rounded,
)
from dist_rng.philox.launches import QUADS, STRIDED, AccessPattern, dropout_access


class PhiloxKind(IntEnum):
    """The formula that makes elements of words; the values are those of src/cpp/philox/launch.h."""

    UNIFORM = 0
    NORMAL = 1
    EXPONENTIAL = 2
    BERNOULLI = 3  # u < a, in the accumulate type of the scalar
    BERNOULLI_TENSOR = 4  # u <= p, u in fp32
    DROPOUT_MASK = 5  # u < a, u in fp32
    MODULO_32 = 6
    MODULO_64 = 7


class Scalar(IntEnum):
    """The dtype of the elements; the values are those of ``Dtype`` in src/cpp/dtype.h."""

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
class KernelSpec:
    """A kernel: which words its elements take, and what it makes of them.

    Attributes:
        kind: the formula.
        scalar: dtype of the elements.
        access: how the kernel's threads access the elements.
        a: low, mean, rate or threshold.
        b: high or standard deviation.
        modulus: for integers, from 1 to 2**64 - 1.
        base: added to an integer.
    """

    kind: PhiloxKind
    scalar: Scalar
    access: AccessPattern
    a: float = 0.0
    b: float = 0.0
    modulus: int = 1
    base: int = 0


@lru_cache(maxsize=4096)
def kernel_spec(draw: Distribution, dtype: torch.dtype, numel: int) -> KernelSpec:
    """Returns the kernel with which a CUDA device draws ``draw`` into a tensor.

    Args:
        draw: the distribution.
        dtype: dtype of the tensor that is written; for fused dropout the mask's.
        numel: number of elements of the global tensor.

    Raises:
        TypeError: torch does not draw this distribution into this dtype.
        ValueError: an argument is out of range, or a GPU's numbers of this distribution are not
            reproduced.
    """
    if isinstance(draw, Cauchy | Geometric | LogNormal):
        raise ValueError(
            f"{_name(draw)}: dist-rng does not reproduce this operator's stream on a GPU, only on"
            " a CPU; draw it on a CPU tensor, or on a plain tensor that you distribute"
        )
    if dtype not in SCALARS:
        raise TypeError(f"{_name(draw)}: expected a dtype that torch draws, got {dtype}")
    scalar = SCALARS[dtype]
    floats = STRIDED[2 if dtype == torch.float64 else 4]
    if isinstance(draw, Uniform | Normal | Exponential) and dtype not in _FLOATING:
        raise TypeError(f"{_name(draw)}: expected a floating-point dtype, got {dtype}")
    if not isinstance(draw, Integers) and dtype in _UNSIGNED:
        raise TypeError(
            f"{_name(draw)}: expected a dtype that torch's CUDA kernels draw, got {dtype}; use"
            " int64"
        )
    check_arguments(draw, dtype)
    match draw:
        case Uniform(low, high):
            return KernelSpec(PhiloxKind.UNIFORM, scalar, floats, low, high)
        case Normal(mean, std):
            return KernelSpec(PhiloxKind.NORMAL, scalar, floats, mean, std)
        case Exponential(rate):
            return KernelSpec(PhiloxKind.EXPONENTIAL, scalar, floats, rate)
        case Bernoulli(p):
            return KernelSpec(PhiloxKind.BERNOULLI, scalar, floats, p)
        case BernoulliTensor():
            return KernelSpec(PhiloxKind.BERNOULLI_TENSOR, scalar, QUADS)
        case FusedDropout(p, itemsize):
            if dtype != torch.bool:
                raise TypeError(f"FusedDropout: expected a mask of torch.bool, got {dtype}")
            threshold = _dropout_threshold(p, itemsize)
            return KernelSpec(
                PhiloxKind.DROPOUT_MASK, scalar, dropout_access(numel, itemsize), threshold
            )
        case Integers():
            values = integer_range(draw, dtype)
            return _integers(values, scalar, wide=values.modulus >= 2**28)
        case AllIntegers():
            wide = dtype in (torch.float64, torch.int64)
            return _integers(all_integers(dtype), scalar, wide=wide)
        case Cauchy() | Geometric() | LogNormal():  # pragma: no cover - refused above
            raise AssertionError(draw)


def prepared_probabilities(
    local: Tensor, draw: Distribution, probabilities: Tensor | None
) -> Tensor | None:
    """Returns probabilities as the kernels read them: converted, with ``local``'s strides.

    Raises:
        ValueError: they are missing, given to a draw that takes none, or of another shape.
        TypeError: they are not floating-point.
    """
    if not isinstance(draw, BernoulliTensor):
        if probabilities is not None:
            raise ValueError(f"{_name(draw)}: expected no probabilities, got a tensor")
        return None
    if probabilities is None or probabilities.shape != local.shape:
        got = "none" if probabilities is None else f"shape {tuple(probabilities.shape)}"
        raise ValueError(
            f"BernoulliTensor: expected local probabilities of shape {tuple(local.shape)}, got"
            f" {got}"
        )
    if not probabilities.is_floating_point():
        raise TypeError(
            f"BernoulliTensor: expected floating-point probabilities, got {probabilities.dtype}"
        )
    dtype = torch.float64 if local.dtype == torch.float64 else torch.float32
    if probabilities.dtype == dtype and probabilities.stride() == local.stride():
        return probabilities
    converted = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device=local.device)
    return converted.copy_(probabilities)


def counts_in_logical_order(spec: KernelSpec) -> bool:
    """Returns whether the kernel numbers elements by dims and not by memory.

    Only fused dropout does where it cannot vectorise.
    """
    return spec.kind == PhiloxKind.DROPOUT_MASK and spec.access.vector == 0


def _dropout_threshold(p: float, itemsize: int) -> float:
    # dropout_cuda compares an fp32 uniform u with x = 1 - p in the input's accumulate type. For
    # fp64 inputs u < x holds exactly where u is less than the smallest fp32 that is not below x.
    keep_probability = 1.0 - p
    nearest = rounded(keep_probability, torch.float32)
    if itemsize == 8 and nearest < keep_probability:
        return float(torch.nextafter(torch.tensor(nearest), torch.tensor(inf)))
    return nearest


def _integers(values: IntegerRange, scalar: Scalar, *, wide: bool) -> KernelSpec:
    kind, unroll = (PhiloxKind.MODULO_64, 2) if wide else (PhiloxKind.MODULO_32, 4)
    return KernelSpec(kind, scalar, STRIDED[unroll], modulus=values.modulus, base=values.base)


def _name(draw: Distribution) -> str:
    return type(draw).__name__
