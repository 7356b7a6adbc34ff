"""The CPU backend: one CPU's mt19937 stream, cut to what a local tensor holds.

Note [the CPU stream]
    A word is one 32-bit draw of torch's mt19937 engine. Every op but ``normal_`` gives element
    i of the global tensor, counted in memory order, the words from ``i * k``, with k 1 or 2.
    ``normal_`` of a contiguous tensor of 16 elements or more works in blocks of 16; of any
    other tensor, in pairs, whose second sample the generator keeps for the next such draw.
    Words of elements that the local tensor does not hold are passed over: by twisting without
    tempering, or by a jump where that is cheaper.

The bits are those of torch's kernels on this very machine; see ``cpu_check``.
"""

from functools import lru_cache

import torch
from torch import Tensor

from dist_rng.cpu_check import check
from dist_rng.cpu_draws import Plan, draw_of
from dist_rng.draws import Distribution
from dist_rng.layout import layout_of, require_fit
from dist_rng.region import Region


def fill(
    local: Tensor,
    region: Region,
    draw: Distribution,
    generator: torch.Generator | None,
    *,
    probabilities: Tensor | None = None,
) -> None:
    """Fill a CPU tensor with what one CPU would have drawn at the region's elements.

    The generator ends where that CPU's would: it advances by the global tensor's draws, on ranks
    that hold nothing too. No autograd: call it under ``no_grad``. Another thread must not draw
    from the same generator meanwhile.

    Args:
        local: strided CPU tensor of the region's grid shape, any strides; with windows,
            contiguous and of ``region.numel`` elements.
        region: what ``local`` holds of which global tensor.
        draw: the distribution.
        generator: of the CPU; None for torch's default one.
        probabilities: of ``BernoulliTensor``: local, ``local``'s shape, floating point.

    Raises:
        TypeError: torch's CPU kernels do not draw this into this dtype.
        ValueError: an argument is out of range, or shapes do not fit.
        RuntimeError: torch draws differently on this machine.
    """
    if local.device.type != "cpu":
        raise TypeError(f"dist_rng.cpu.fill draws on CPU tensors, not on {local.device}")
    if generator is None:
        generator = torch.default_generator
    chances = None
    if probabilities is not None:
        if probabilities.shape != local.shape:
            raise ValueError(
                f"probabilities have shape {tuple(probabilities.shape)}, the local tensor"
                f" {tuple(local.shape)}; give the local probabilities, expanded"
            )
        if probabilities.stride() != local.stride():
            _fill_dense(local, region, draw, generator, probabilities)
            return
        chances = probabilities.dtype
    run = draw_of(draw, local.dtype, chances)
    kind: type = type(draw)
    check(kind, local.dtype, chances)
    plan = plan_of(region, local.shape, local.stride())
    state = generator.get_state()
    addresses = local.data_ptr(), 0 if probabilities is None else probabilities.data_ptr()
    run(plan, state.data_ptr(), *addresses)
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
    # One walk serves both tensors, so they must have the same strides.
    elements = torch.empty(local.shape, dtype=local.dtype, device="cpu")
    chances = torch.empty(local.shape, dtype=probabilities.dtype, device="cpu")
    chances.copy_(probabilities)
    fill(elements, region, draw, generator, probabilities=chances)
    local.copy_(elements)


@lru_cache(maxsize=4096)
def plan_of(region: Region, shape: tuple[int, ...], strides: tuple[int, ...]) -> Plan:
    """Return the compiled walk over a local tensor of this shape and these strides.

    Raises:
        ValueError: the local tensor does not fit the region, or its elements overlap.
    """
    require_fit(region, shape, strides)
    # torch.Tensor.is_contiguous looks at no dim of size 1.
    longer = [dim for dim in region.memory_order if region.global_shape[dim] != 1]
    grid = layout_of(region, strides).grid()
    return Plan(grid, region.global_numel, contiguous=longer == sorted(longer))
