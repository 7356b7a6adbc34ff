"""Emulator backend: fills CPU tensors with their part of what a GPU would have drawn.

Bit-equal to the device for uniform, Bernoulli, dropout masks and integers. Normal and exponential
in fp32, bf16 and f16 are not: the device takes sine, cosine and logarithm from its special function
units, which no host has. They agree to 4e-6 standard deviations, and 4e-6 times (1 + the value)
over the rate; fp64 to a few units in the last place.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dist_rng import _core
from dist_rng.draws import BernoulliTensor, Distribution
from dist_rng.emulated_device import (
    Position,
    active_device,
    active_geometry,
    emulated_device,
    is_active,
)
from dist_rng.layout import layout_of, require_fit
from dist_rng.philox import Schedule, schedule
from dist_rng.recipe import Kind, Recipe, recipe_of
from dist_rng.region import Region

__all__ = ["active_geometry", "emulated_device", "fill", "is_active"]

_DTYPES: dict[torch.dtype, Any] = {
    getattr(torch, name): getattr(_core.Dtype, name)
    for name in [
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "bool",
        "uint16",
        "uint32",
        "uint64",
    ]
}


def fill(
    local: Tensor,
    region: Region,
    draw: Distribution,
    generator: torch.Generator | None = None,
    *,
    probabilities: Tensor | None = None,
) -> None:
    """Fill a CPU tensor with what the emulated device would have drawn at ``region``.

    Args:
        local: the tensor; any strides without windows, contiguous with them.
        region: what it holds of the global tensor.
        draw: the distribution.
        generator: a CPU generator that stands for a CUDA one; by default torch's.
        probabilities: for ``BernoulliTensor`` alone, of ``local``'s shape.

    Raises:
        TypeError: torch does not draw this distribution into this dtype.
        ValueError: an argument is out of range, or does not fit.
        RuntimeError: no device is emulated.
    """
    device = active_device()
    if device is None:
        raise RuntimeError("no GPU is emulated: use single_device_rng(geometry=...)")
    require_fit(region, tuple(local.shape), local.stride())
    generator = torch.default_generator if generator is None else generator
    recipe = recipe_of(draw, local.dtype, region.global_numel)
    given = prepared_probabilities(local, draw, probabilities)
    position = device.generators.position(generator)
    plan = schedule(
        recipe.reach, region.global_numel, local.itemsize, device.geometry, device.policy
    )
    if region.numel:
        if given is not None and not bool(((given >= 0) & (given <= 1)).all()):
            raise ValueError("torch.bernoulli: the probabilities must lie in [0, 1]")
        _fill(local, region, recipe, plan, position, given)
    if plan.advance:
        device.generators.move_to(generator, position.offset + plan.advance)


def prepared_probabilities(
    local: Tensor, draw: Distribution, probabilities: Tensor | None
) -> Tensor | None:
    """Return probabilities as the kernels read them: converted, with ``local``'s strides.

    Raises:
        ValueError: there are none, or some that the draw has no use for, or of another shape.
        TypeError: they are not floating-point.
    """
    if not isinstance(draw, BernoulliTensor):
        if probabilities is not None:
            raise ValueError(f"{type(draw).__name__} takes no probabilities")
        return None
    if probabilities is None or probabilities.shape != local.shape:
        found = None if probabilities is None else tuple(probabilities.shape)
        raise ValueError(
            f"BernoulliTensor takes local probabilities of shape {tuple(local.shape)}, not {found}"
        )
    if not probabilities.is_floating_point():
        raise TypeError(f"probabilities are floating-point, not {probabilities.dtype}")
    dtype = torch.float64 if local.dtype == torch.float64 else torch.float32
    if probabilities.dtype == dtype and probabilities.stride() == local.stride():
        return probabilities
    converted = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device=local.device)
    return converted.copy_(probabilities)


def counts_in_logical_order(recipe: Recipe) -> bool:
    """Return whether the kernel numbers elements by dims and not by memory.

    That is fused dropout which cannot vectorise, alone.
    """
    return recipe.kind == Kind.KEEP and recipe.reach.vector == 0


def _fill(
    local: Tensor,
    region: Region,
    recipe: Recipe,
    plan: Schedule,
    position: Position,
    probabilities: Tensor | None,
) -> None:
    layout = layout_of(region, local.stride(), logical=counts_in_logical_order(recipe))
    stream = _core.PhiloxStream(
        position.seed,
        position.offset,
        recipe.reach.unroll,
        recipe.reach.vector,
        [(launch.start, launch.stop, launch.threads, launch.offset) for launch in plan.launches],
    )
    _core.philox_fill(
        local.data_ptr(),
        _DTYPES[local.dtype],
        layout.grid(),
        stream,
        int(recipe.kind),
        _arguments(recipe),
        0 if probabilities is None else probabilities.data_ptr(),
    )


@lru_cache(maxsize=1024)
def _arguments(recipe: Recipe) -> Any:
    return _core.PhiloxArguments(recipe.a, recipe.b, recipe.modulus, recipe.base)
