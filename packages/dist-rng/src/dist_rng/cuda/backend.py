"""Fills local CUDA tensors with their part of what one GPU would have drawn.

Importing this module needs neither a device nor the compiled kernels. Inside ``single_device_rng``
the kernels reproduce the GPU of its geometry, otherwise the GPU on which they run.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_rng.cuda.boxes import KernelBox, boxes_of
from dist_rng.cuda.library import LIBRARY, DimParams, FillParams, load
from dist_rng.distributions import Distribution
from dist_rng.emulation.device import active_geometry
from dist_rng.philox.geometry import Geometry, policy_of
from dist_rng.philox.kernel_spec import (
    KernelSpec,
    counts_in_logical_order,
    kernel_spec,
    prepared_probabilities,
)
from dist_rng.philox.launches import Launch, LaunchSchedule, launch_schedule
from dist_rng.regions.draw_strides import draw_strides, require_fit
from dist_rng.regions.region import Region


def available() -> bool:
    """Returns whether there is a CUDA device and the kernels were built."""
    return torch.cuda.is_available() and LIBRARY.exists()


def fill(
    local: Tensor,
    region: Region,
    draw: Distribution,
    generator: torch.Generator | None = None,
    *,
    probabilities: Tensor | None = None,
) -> None:
    """Fills a CUDA tensor with what one device would have drawn at ``region``.

    The work is enqueued on the current stream of ``local``'s device.

    Args:
        local: the tensor; any strides without windows, contiguous with them.
        region: the elements of the global tensor that ``local`` holds.
        draw: the distribution.
        generator: a CUDA generator of ``local``'s device; None for torch's default one.
        probabilities: only for ``BernoulliTensor``, of ``local``'s shape.

    Raises:
        TypeError: torch does not draw this distribution into this dtype.
        ValueError: an argument is out of range, or shapes do not match.
        RuntimeError: the kernels were not built, a launch failed, or a CUDA graph is being captured
            and this torch does not expose the state of a captured generator.
    """
    library = load()
    require_fit(region, tuple(local.shape), local.stride())
    spec = kernel_spec(draw, local.dtype, region.global_numel)
    prepared = prepared_probabilities(local, draw, probabilities)
    geometry = active_geometry() or Geometry.of_device(local.device)
    schedule = launch_schedule(
        spec.access,
        region.global_numel,
        local.itemsize,
        geometry,
        policy_of(torch.__version__),
    )
    if not schedule.advance:
        return
    position = reserve(_generator_of(local.device, generator), schedule.advance)
    if not region.numel:
        return
    with torch.cuda.device(local.device):
        stream = torch.cuda.current_stream(local.device).cuda_stream
        for params in fill_params(local, region, spec, schedule, position, prepared):
            library.fill(params, stream)


@dataclass(frozen=True)
class ReservedPosition:
    """The position of a CUDA generator before a draw.

    Attributes:
        seed: 64 bits; not used under capture.
        offset: words per thread; not used under capture.
        seed_address: under capture, the address of the seed in device memory, else 0.
        offset_address: under capture, the address of the offset in device memory, else 0.
        within_graph: words per thread that the captured graph has drawn before.
    """

    seed: int
    offset: int
    seed_address: int = 0
    offset_address: int = 0
    within_graph: int = 0


def reserve(generator: torch.Generator, advance: int) -> ReservedPosition:
    """Advances a CUDA generator, and returns its position before.

    Raises:
        RuntimeError: a CUDA graph is being captured, and this torch is older than 2.14.
    """
    if not torch.cuda.is_current_stream_capturing():
        offset = generator.get_offset()
        generator.set_offset(offset + advance)
        return ReservedPosition(generator.initial_seed(), offset)
    if not hasattr(generator, "philox_state"):
        raise RuntimeError(
            "capturing a CUDA graph: expected torch 2.14 or newer, whose Generator.philox_state"
            f" exposes the generator's state to other packages, got {torch.__version__}; draw"
            " outside of the graph, or use a newer torch"
        )
    seed, offset, within = generator.philox_state(advance)
    return ReservedPosition(0, 0, seed.data_ptr(), offset.data_ptr(), int(within.item()))


def fill_params(
    local: Tensor,
    region: Region,
    spec: KernelSpec,
    schedule: LaunchSchedule,
    position: ReservedPosition,
    probabilities: Tensor | None,
) -> list[FillParams]:
    """Returns the launches that fill ``local``: one per box and launch of torch that overlap."""
    layout = draw_strides(region, local.stride(), logical=counts_in_logical_order(spec))
    params = []
    for launch in schedule.launches:
        for box in boxes_of(layout):
            if _overlap(box, launch):
                params.append(_params_of(local, spec, launch, box, position, probabilities))
    return params


def _overlap(box: KernelBox, launch: Launch) -> bool:
    # The first and the last element of the box have its smallest and its largest draw index.
    span = sum(
        ((dim.size - 1) // dim.length * dim.period + (dim.size - 1) % dim.length) * dim.draw_stride
        for dim in box.dims
    )
    return box.draw < launch.stop and launch.start <= box.draw + span


def _params_of(
    local: Tensor,
    spec: KernelSpec,
    launch: Launch,
    box: KernelBox,
    position: ReservedPosition,
    probabilities: Tensor | None,
) -> FillParams:
    params = FillParams(
        data=local.data_ptr(),
        probabilities=0 if probabilities is None else probabilities.data_ptr(),
        kind=spec.kind,
        dtype=spec.scalar,
        unroll=spec.access.unroll,
        vector=spec.access.vector,
        a=spec.a,
        b=spec.b,
        modulus=spec.modulus,
        base=spec.base,
        seed=position.seed,
        offset=position.offset,
        seed_address=position.seed_address,
        offset_address=position.offset_address,
        relative_offset=position.within_graph + launch.offset,
        start=launch.start,
        stop=launch.stop,
        threads=launch.threads,
        first=box.first,
        count=box.count,
        draw=box.draw,
        local=box.local,
        device=max(local.get_device(), 0),
        dims=len(box.dims),
    )
    for index, dim in enumerate(box.dims):
        params.dim[index] = DimParams(
            dim.size, dim.length, dim.period, dim.draw_stride, dim.local_stride
        )
    return params


def _generator_of(device: torch.device, generator: torch.Generator | None) -> Any:
    if generator is None:
        return torch.cuda.default_generators[device.index]
    if generator.device.type != "cuda" or generator.device.index not in (None, device.index):
        raise ValueError(
            f"expected a generator on {device}, where the tensor is, got one on {generator.device}"
        )
    return generator
