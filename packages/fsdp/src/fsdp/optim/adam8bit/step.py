"""Prepares the local update of each parameter, runs all of them, and writes the results back.

Note: an update takes local fp32 tensors. A parameter of another dtype, that is not contiguous, or
whose shards split blocks is updated in a copy, which is then copied or redistributed back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp.optim.adam8bit.state import BlockLayout, Placements, block_layout, local_moments
from fsdp.optim.adam8bit.update import AdamCoefficients, Moments, update, update_many
from fsdp.optim.adam8bit.validation import check_grad
from fsdp.optim.tensors import local_of, placements_of

__all__ = ["CachedLayout", "ParamUpdate", "prepare_update", "run_updates"]


@dataclass(eq=False)
class CachedLayout:
    """The block layout of a parameter, with the options and placements that it was made for.

    Attributes:
        block_size: option of the parameter group.
        min_8bit_size: option of the parameter group.
        placements: the parameter's.
        layout: of its blocks; None if its moments are not quantized.
        exp_avg: the state tensor that `moments` are views of; None before the first step.
        moments: the local tensors of the parameter's state.
    """

    block_size: int
    min_8bit_size: int
    placements: Placements
    layout: BlockLayout | None
    exp_avg: torch.Tensor | None = None
    moments: Moments | None = None

    @classmethod
    def of(cls, param: torch.Tensor, group: dict[str, Any]) -> CachedLayout:
        """Computes the layout of a parameter."""
        block_size, min_8bit_size = group["block_size"], group["min_8bit_size"]
        quantized = param.numel() >= max(1, min_8bit_size)
        layout = block_layout(param, block_size) if quantized else None
        return cls(block_size, min_8bit_size, placements_of(param), layout)

    def is_valid(self, param: torch.Tensor, group: dict[str, Any]) -> bool:
        """Returns whether the options and placements are the same as before."""
        return (
            self.block_size == group["block_size"]
            and self.min_8bit_size == group["min_8bit_size"]
            and self.placements == placements_of(param)
        )

    def moments_of(self, state: dict[str, Any]) -> Moments:
        """Returns the local tensors of the parameter's state; their views are made once."""
        if self.moments is None or self.exp_avg is not state["exp_avg"]:
            self.exp_avg, self.moments = state["exp_avg"], local_moments(state, self.block_size)
        return self.moments


@dataclass(frozen=True, eq=False)
class ParamUpdate:
    """The local update of one parameter.

    Attributes:
        name: returns the name of the parameter.
        param: fp32, contiguous; it is updated.
        grad: fp32, contiguous.
        moments: they are updated.
        coefficients: of the step.
        target: the parameter that gets the result; None if `param` is its memory.
        resharded: the parameter with every block on one rank, which is redistributed to `target`;
            None if the parameter's shards do not split blocks.
    """

    name: Callable[[], str]
    param: torch.Tensor
    grad: torch.Tensor
    moments: Moments
    coefficients: AdamCoefficients
    target: torch.Tensor | None
    resharded: DTensor | None

    def write_back(self) -> None:
        """Writes the result to the parameter, if it was computed in a copy."""
        if self.target is None:
            return
        result = local_of(self.target if self.resharded is None else self.resharded)
        result.copy_(self.param)
        if self.resharded is not None:
            restored = self.resharded.redistribute(placements=placements_of(self.target))
            local_of(self.target).copy_(restored._local_tensor)


def prepare_update(
    param: torch.Tensor,
    name: Callable[[], str],
    state: dict[str, Any],
    cached: CachedLayout,
    coefficients: AdamCoefficients,
) -> ParamUpdate:
    """Prepares the update of a parameter; communicates only if its shards split blocks.

    Raises:
        ValueError: the gradient is sparse, or only one of gradient and parameter is a DTensor.
    """
    grad = param.grad
    assert grad is not None
    check_grad(param, grad, name)
    moments = cached.moments_of(state)
    layout, resharded = cached.layout, None
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        placements = cached.placements if layout is None else layout.moments
        if placements != cached.placements:
            resharded = param.redistribute(placements=placements)
        if grad.placements != placements:
            grad = grad.redistribute(placements=placements)
    local = local_of(param if resharded is None else resharded)
    work = local.contiguous().float()
    return ParamUpdate(
        name, work, local_of(grad).contiguous().float(), moments, coefficients,
        None if work is local and resharded is None else param, resharded,
    )  # fmt: skip


def run_updates(updates: Sequence[ParamUpdate]) -> list[str]:
    """Runs updates, those on the CPU in C++, and writes the results to the parameters.

    Returns:
        The names of the parameters on the CPU that have a block that is not finite. Parameters on
        other devices are not checked, as that would wait for the device.
    """
    on_cpu: dict[tuple[int, int], list[ParamUpdate]] = {}
    for one in updates:
        if one.param.device.type == "cpu":
            key = id(one.coefficients), one.moments.block_size
            on_cpu.setdefault(key, []).append(one)
        else:
            update(one.param, one.grad, one.moments, one.coefficients)
    not_finite = []
    for batch in on_cpu.values():
        indices = update_many(
            [one.param for one in batch], [one.grad for one in batch],
            [one.moments for one in batch], batch[0].coefficients,
        )  # fmt: skip
        not_finite += [batch[i].name() for i in indices]
    for one in updates:
        one.write_back()
    return not_finite
