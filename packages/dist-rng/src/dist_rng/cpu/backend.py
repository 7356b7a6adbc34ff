"""Fills local CPU tensors with their part of what one CPU would have drawn.

Note [the CPU stream]
    A word is one 32-bit draw of torch's mt19937 engine. Every op except ``normal_`` gives element
    i of the global tensor, counted in memory order, the words from ``i * k``, where k is 1 or 2.
    ``normal_`` of a contiguous tensor of 16 elements or more draws in blocks of 16; of any other
    tensor it draws in pairs, whose second sample the generator caches for the next such draw.
    Words of elements that the local tensor does not hold are skipped: by twists without
    tempering, or by a jump where that is cheaper.

The bits are those of torch's kernels on this machine, which ``cpu/self_check.py`` verifies.
"""

from functools import lru_cache

import torch
from torch import Tensor

from dist_rng.cpu.draws import CompiledLayout, cpu_draw
from dist_rng.cpu.self_check import check
from dist_rng.distributions import Distribution
from dist_rng.regions.draw_strides import draw_strides, require_fit
from dist_rng.regions.region import Region


def fill(
    local: Tensor,
    region: Region,
    draw: Distribution,
    generator: torch.Generator | None,
    *,
    probabilities: Tensor | None = None,
) -> None:
    """Fills a CPU tensor with what one CPU would have drawn at the region's elements.

    The generator advances by the draws of the global tensor, also on ranks that hold nothing. The
    fill does not support autograd: call it under ``no_grad``. No other thread may draw from the
    generator at the same time.

    Args:
        local: CPU tensor of the region's grid shape, with any strides; with windows, contiguous
            and of ``region.numel`` elements.
        region: the elements of the global tensor that ``local`` holds.
        draw: the distribution.
        generator: a CPU generator; None for torch's default one.
        probabilities: only for ``BernoulliTensor``: the local probabilities, of ``local``'s shape,
            floating point.

    Raises:
        TypeError: torch's CPU kernels do not draw this into this dtype.
        ValueError: an argument is out of range, or shapes do not match.
        RuntimeError: torch draws other numbers on this machine than dist-rng reproduces.
    """
    if local.device.type != "cpu":
        raise TypeError(f"dist_rng.cpu.fill: expected a CPU tensor, got one on {local.device}")
    if generator is None:
        generator = torch.default_generator
    probabilities_dtype = None
    if probabilities is not None:
        if probabilities.shape != local.shape:
            raise ValueError(
                f"probabilities: expected the local tensor's shape {tuple(local.shape)}, got"
                f" {tuple(probabilities.shape)}; pass the local probabilities, expanded"
            )
        if probabilities.stride() != local.stride():
            _fill_dense(local, region, draw, generator, probabilities)
            return
        probabilities_dtype = probabilities.dtype
    run = cpu_draw(draw, local.dtype, probabilities_dtype)
    kind: type = type(draw)
    check(kind, local.dtype, probabilities_dtype)
    layout = compiled_layout(region, local.shape, local.stride())
    state = generator.get_state()
    addresses = local.data_ptr(), 0 if probabilities is None else probabilities.data_ptr()
    run(layout, state.data_ptr(), *addresses)
    generator.set_state(state)
    if not local.is_inference():
        torch.autograd.graph.increment_version(local)


def _fill_dense(
    local: Tensor,
    region: Region,
    draw: Distribution,
    generator: torch.Generator,
    probabilities: Tensor,
) -> None:
    # One walk indexes both tensors, so they must have the same strides.
    elements = torch.empty(local.shape, dtype=local.dtype, device="cpu")
    dense = torch.empty(local.shape, dtype=probabilities.dtype, device="cpu")
    dense.copy_(probabilities)
    fill(elements, region, draw, generator, probabilities=dense)
    local.copy_(elements)


@lru_cache(maxsize=4096)
def compiled_layout(
    region: Region, shape: tuple[int, ...], strides: tuple[int, ...]
) -> CompiledLayout:
    """Returns the compiled walk over a local tensor of this shape and these strides.

    Raises:
        ValueError: the local tensor does not match the region, or its elements overlap.
    """
    require_fit(region, shape, strides)
    # torch.Tensor.is_contiguous ignores dims of size 1.
    longer = [dim for dim in region.memory_order if region.global_shape[dim] != 1]
    grid = draw_strides(region, strides).grid()
    return CompiledLayout(grid, region.global_numel, contiguous=longer == sorted(longer))
