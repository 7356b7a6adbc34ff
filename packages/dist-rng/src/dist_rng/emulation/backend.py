"""Fills local CPU tensors with their part of what a GPU would have drawn.

The bits are those of the device for uniform, Bernoulli, dropout masks and integers. Normal and
exponential in fp32, bf16 and f16 are not: the device computes sine, cosine and logarithm with its
special function units, which no host has. They agree to 4e-6 standard deviations, and 4e-6 times
(1 + the value) over the rate; fp64 agrees to a few units in the last place.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dist_rng import _core
from dist_rng.distributions import Distribution
from dist_rng.emulation.device import GeneratorPosition, active_device
from dist_rng.philox.kernel_spec import (
    KernelSpec,
    counts_in_logical_order,
    kernel_spec,
    prepared_probabilities,
)
from dist_rng.philox.launches import LaunchSchedule, launch_schedule
from dist_rng.regions.draw_strides import draw_strides, require_fit
from dist_rng.regions.region import Region


def fill(
    local: Tensor,
    region: Region,
    draw: Distribution,
    generator: torch.Generator | None = None,
    *,
    probabilities: Tensor | None = None,
) -> None:
    """Fills a CPU tensor with what the emulated device would have drawn at ``region``.

    Args:
        local: the tensor; any strides without windows, contiguous with them.
        region: the elements of the global tensor that ``local`` holds.
        draw: the distribution.
        generator: a CPU generator, used as a CUDA generator; None for torch's default one.
        probabilities: only for ``BernoulliTensor``, of ``local``'s shape.

    Raises:
        TypeError: torch does not draw this distribution into this dtype.
        ValueError: an argument is out of range, or shapes do not match.
        RuntimeError: no device is emulated.
    """
    device = active_device()
    if device is None:
        raise RuntimeError(
            "expected an emulated GPU, got none; use single_device_rng(geometry=...)"
        )
    require_fit(region, tuple(local.shape), local.stride())
    generator = torch.default_generator if generator is None else generator
    spec = kernel_spec(draw, local.dtype, region.global_numel)
    prepared = prepared_probabilities(local, draw, probabilities)
    position = device.generators.position(generator)
    schedule = launch_schedule(
        spec.access, region.global_numel, local.itemsize, device.geometry, device.policy
    )
    if region.numel:
        if prepared is not None and not bool(((prepared >= 0) & (prepared <= 1)).all()):
            raise ValueError("torch.bernoulli: expected probabilities in [0, 1], got others")
        _fill(local, region, spec, schedule, position, prepared)
    if schedule.advance:
        device.generators.set_offset(generator, position.offset + schedule.advance)


def _fill(
    local: Tensor,
    region: Region,
    spec: KernelSpec,
    schedule: LaunchSchedule,
    position: GeneratorPosition,
    probabilities: Tensor | None,
) -> None:
    layout = draw_strides(region, local.stride(), logical=counts_in_logical_order(spec))
    stream = _core.PhiloxStream(
        position.seed,
        position.offset,
        spec.access.unroll,
        spec.access.vector,
        [
            (launch.start, launch.stop, launch.threads, launch.offset)
            for launch in schedule.launches
        ],
    )
    _core.philox_fill(
        local.data_ptr(),
        _core.Dtype(int(spec.scalar)),
        layout.grid(),
        stream,
        int(spec.kind),
        _arguments(spec),
        0 if probabilities is None else probabilities.data_ptr(),
    )


@lru_cache(maxsize=1024)
def _arguments(spec: KernelSpec) -> Any:
    return _core.PhiloxArguments(spec.a, spec.b, spec.modulus, spec.base)
