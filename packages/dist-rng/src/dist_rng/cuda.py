"""CUDA backend: fills local CUDA tensors with their part of what one device would have drawn.

Importing it needs neither a device nor the compiled kernels. While ``single_device_rng`` names a
geometry, the kernels reproduce that GPU; otherwise the one they run on.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_rng import cuda_library, emulate
from dist_rng.cuda_boxes import Box, boxes_of
from dist_rng.cuda_library import Job, JobDim
from dist_rng.draws import Distribution
from dist_rng.emulate import counts_in_logical_order, prepared_probabilities
from dist_rng.geometry import Geometry, policy_of
from dist_rng.layout import layout_of, require_fit
from dist_rng.philox import Launch, Schedule, schedule
from dist_rng.recipe import Recipe, recipe_of
from dist_rng.region import Region


def available() -> bool:
    """Return whether there is a CUDA device and the kernels were built."""
    return torch.cuda.is_available() and cuda_library.LIBRARY.exists()


def fill(
    local: Tensor,
    region: Region,
    draw: Distribution,
    generator: torch.Generator | None = None,
    *,
    probabilities: Tensor | None = None,
) -> None:
    """Fill a CUDA tensor with what one device would have drawn at ``region``.

    The work is enqueued on the current stream of ``local``'s device.

    Args:
        local: the tensor; any strides without windows, contiguous with them.
        region: what it holds of the global tensor.
        draw: the distribution.
        generator: a CUDA generator of ``local``'s device; by default torch's.
        probabilities: for ``BernoulliTensor`` alone, of ``local``'s shape.

    Raises:
        TypeError: torch does not draw this distribution into this dtype.
        ValueError: an argument is out of range, or does not fit.
        RuntimeError: the kernels were not built, CUDA refused a launch, or a CUDA graph is being
            captured and this torch cannot say where its generator will stand.
    """
    library = cuda_library.load()
    require_fit(region, tuple(local.shape), local.stride())
    recipe = recipe_of(draw, local.dtype, region.global_numel)
    given = prepared_probabilities(local, draw, probabilities)
    geometry = emulate.active_geometry() or Geometry.of_device(local.device)
    plan = schedule(
        recipe.reach,
        region.global_numel,
        local.itemsize,
        geometry,
        policy_of(torch.__version__),
    )
    if not plan.advance:
        return
    position = reserve(_generator_of(local.device, generator), plan.advance)
    if not region.numel:
        return
    with torch.cuda.device(local.device):
        stream = torch.cuda.current_stream(local.device).cuda_stream
        for job in jobs(local, region, recipe, plan, position, given):
            library.fill(job, stream)


@dataclass(frozen=True)
class ReservedPosition:
    """Where a CUDA generator stood before a draw.

    Attributes:
        seed: 64 bits; of no meaning under capture.
        offset: words per thread; of no meaning under capture.
        seed_address: under capture, where the seed will lie on the device, else 0.
        offset_address: likewise the offset.
        within_graph: words per thread that the captured graph has drawn before.
    """

    seed: int
    offset: int
    seed_address: int = 0
    offset_address: int = 0
    within_graph: int = 0


def reserve(generator: torch.Generator, advance: int) -> ReservedPosition:
    """Move a CUDA generator on, and return where it stood.

    Raises:
        RuntimeError: a CUDA graph is being captured, and this torch is older than 2.14.
    """
    if not torch.cuda.is_current_stream_capturing():
        offset = generator.get_offset()
        generator.set_offset(offset + advance)
        return ReservedPosition(generator.initial_seed(), offset)
    if not hasattr(generator, "philox_state"):
        raise RuntimeError(
            f"torch {torch.__version__} does not tell kernels of other packages where its generator"
            " stands while a CUDA graph is captured (Generator.philox_state, torch 2.14): draw"
            " outside of the graph, or use a newer torch"
        )
    seed, offset, within = generator.philox_state(advance)
    return ReservedPosition(0, 0, seed.data_ptr(), offset.data_ptr(), int(within.item()))


def jobs(
    local: Tensor,
    region: Region,
    recipe: Recipe,
    plan: Schedule,
    position: ReservedPosition,
    probabilities: Tensor | None,
) -> list[Job]:
    """Return the launches that fill ``local``: one per box and launch of torch that meet."""
    layout = layout_of(region, local.stride(), logical=counts_in_logical_order(recipe))
    made = []
    for launch in plan.launches:
        for box in boxes_of(layout):
            if _meet(box, launch):
                made.append(_job(local, recipe, launch, box, position, probabilities))
    return made


def _meet(box: Box, launch: Launch) -> bool:
    # The first and the last element of the whole box are the ends of its draws.
    reach = sum(
        ((dim.size - 1) // dim.length * dim.period + (dim.size - 1) % dim.length) * dim.draw_stride
        for dim in box.dims
    )
    return box.draw < launch.stop and launch.start <= box.draw + reach


def _job(
    local: Tensor,
    recipe: Recipe,
    launch: Launch,
    box: Box,
    position: ReservedPosition,
    probabilities: Tensor | None,
) -> Job:
    job = Job(
        data=local.data_ptr(),
        probabilities=0 if probabilities is None else probabilities.data_ptr(),
        kind=recipe.kind,
        dtype=recipe.scalar,
        unroll=recipe.reach.unroll,
        vector=recipe.reach.vector,
        a=recipe.a,
        b=recipe.b,
        modulus=recipe.modulus,
        base=recipe.base,
        seed=position.seed,
        offset=position.offset,
        seed_address=position.seed_address,
        offset_address=position.offset_address,
        after=position.within_graph + launch.offset,
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
        job.dim[index] = JobDim(dim.size, dim.length, dim.period, dim.draw_stride, dim.local_stride)
    return job


def _generator_of(device: torch.device, generator: torch.Generator | None) -> Any:
    if generator is None:
        return torch.cuda.default_generators[device.index]
    if generator.device.type != "cuda" or generator.device.index not in (None, device.index):
        raise ValueError(
            f"a tensor on {device} is drawn with a generator on {device}, not on {generator.device}"
        )
    return generator
