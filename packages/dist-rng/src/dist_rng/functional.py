"""Random fills of local tensors, without DTensor: each takes the local tensor and its region.

Every function fills ``local`` with what one device would have drawn at ``region``'s elements
of the global tensor, and leaves ``generator`` where that device's would stand: it advances by
the draws of the *global* tensor, on ranks that hold nothing too. No rank talks to another.

All of them raise ``ValueError`` where the region does not fit the local tensor and
``TypeError`` for a dtype or device that the operation does not support.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dist_rng import cpu, cuda, emulate
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
from dist_rng.emulated_device import is_active
from dist_rng.region import Region


def uniform_(
    local: Tensor,
    region: Region,
    low: float = 0.0,
    high: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill ``local`` from the uniform distribution on [low, high), as ``Tensor.uniform_``."""
    return fill(local, region, Uniform(low, high), generator=generator)


def normal_(
    local: Tensor,
    region: Region,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill ``local`` from the normal distribution, as ``Tensor.normal_``."""
    return fill(local, region, Normal(mean, std), generator=generator)


def bernoulli_(
    local: Tensor,
    region: Region,
    p: float | Tensor = 0.5,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill ``local`` with ones of probability ``p``, as ``Tensor.bernoulli_``.

    Args:
        local: any dtype.
        region: what ``local`` holds.
        p: one probability, or local probabilities of ``local``'s shape, floating point.
        generator: as everywhere in this module.
    """
    if isinstance(p, Tensor):
        return fill(local, region, BernoulliTensor(), probabilities=p, generator=generator)
    return fill(local, region, Bernoulli(p), generator=generator)


def exponential_(
    local: Tensor,
    region: Region,
    lambd: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill ``local`` from the exponential distribution, as ``Tensor.exponential_``."""
    return fill(local, region, Exponential(lambd), generator=generator)


def randint_(
    local: Tensor,
    region: Region,
    low: int,
    high: int,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill ``local`` with integers ``low <= x < high``, as ``Tensor.random_(low, high)``."""
    return fill(local, region, Integers(low, high), generator=generator)


def random_(local: Tensor, region: Region, *, generator: torch.Generator | None = None) -> Tensor:
    """Fill ``local`` with all the integers its dtype holds, as ``Tensor.random_()``."""
    return fill(local, region, AllIntegers(), generator=generator)


def dropout(
    local: Tensor,
    region: Region,
    p: float = 0.5,
    *,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return ``local`` with the elements zeroed that one device's ``F.dropout`` would zero.

    Differentiable in ``local``; the values are those of the device's own kernel, bit for bit.

    Raises:
        ValueError: ``p`` is outside [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability is {p}; it must lie in [0, 1]")
    if not training or p == 0.0 or region.global_numel == 0:
        return local
    if p == 1.0:
        return local * torch.zeros((), dtype=local.dtype, device=local.device)  # draws nothing
    if draws_as_gpu(local):
        mask = torch.empty_like(local, dtype=torch.bool)
        fill(mask, region, FusedDropout(p, local.itemsize), generator=generator)
        return apply_fused_mask(local, mask, p)
    noise = torch.empty_like(local)
    fill(noise, region, Bernoulli(1.0 - p), generator=generator)
    # The order of torch's _dropout_impl (aten/src/ATen/native/Dropout.cpp): divide, then scale.
    return local * noise.div_(1.0 - p)


def draws_as_gpu(local: Tensor) -> bool:
    """Return whether a GPU is reproduced, which runs dropout as one kernel, with one mask."""
    return local.is_cuda or (local.device.type == "cpu" and is_active())


def apply_fused_mask(local: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return what the fused kernel makes of its input: ``x * mask / (1 - p)`` in fp32 or fp64."""
    wide = local if local.dtype == torch.float64 else local.float()
    return (wide * mask * (1.0 / (1.0 - p))).to(local.dtype)


def fill(
    local: Tensor,
    region: Region,
    draw: Distribution,
    *,
    probabilities: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill ``local`` from any distribution, on the backend of its device; return it.

    Meta tensors and FakeTensors draw nothing and advance nothing, as on one device.
    """
    if local.is_meta or isinstance(local, FakeTensor):
        return local
    with torch.no_grad():
        if local.is_cuda:
            cuda.fill(local, region, draw, generator, probabilities=probabilities)
        elif local.device.type != "cpu":
            raise TypeError(
                f"dist-rng draws on CPU and CUDA tensors, not on {local.device}; draw on the CPU"
                " and move the result"
            )
        elif is_active():
            emulate.fill(local, region, draw, generator, probabilities=probabilities)
        else:
            cpu.fill(local, region, draw, generator, probabilities=probabilities)
    return local
