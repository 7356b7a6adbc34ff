"""The state of a parameter: made, and seen as flat local tensors."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from fsdp.optim.adam8bit.blocks import BlockLayout, Placements
from fsdp.optim.adam8bit.quantize import CodeBook
from fsdp.optim.adam8bit.update import Moments
from fsdp.optim.tensors import local_of, placements_of
from ragged_shard import local_shape

__all__ = ["QUANTIZED", "WHOLE", "moments_of", "new_state", "place_of"]

QUANTIZED = {
    "exp_avg": torch.uint8,
    "exp_avg_scale": torch.float32,
    "exp_avg_sq": torch.uint8,
    "exp_avg_sq_scale": torch.float32,
}
WHOLE = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def new_state(param: torch.Tensor, layout: BlockLayout | None) -> dict[str, torch.Tensor]:
    """What a parameter has before its first step.

    Args:
        param: it.
        layout: of its blocks; None if its moments are not quantised.
    """
    state = {"step": torch.tensor(0.0)}
    if layout is None:
        for key in WHOLE:
            state[key] = _full(param, tuple(param.shape), placements_of(param), 0, torch.float32)
        return state
    zeros = {"exp_avg": CodeBook.SIGNED.zero}
    for key, dtype in QUANTIZED.items():
        state[key] = _full(param, *place_of(param, layout, key), zeros.get(key, 0), dtype)
    return state


def moments_of(state: dict[str, torch.Tensor], block_size: int) -> Moments:
    """The local tensors of a state, flat and written through."""
    flat = {key: local_of(value).view(-1) for key, value in state.items() if key != "step"}
    return Moments(
        flat["exp_avg"], flat.get("exp_avg_scale"),
        flat["exp_avg_sq"], flat.get("exp_avg_sq_scale"), block_size,
    )  # fmt: skip


def place_of(
    param: torch.Tensor, layout: BlockLayout, key: str
) -> tuple[tuple[int, ...], Placements]:
    """The global shape of a quantised state, and its placements."""
    if key.endswith("_scale"):
        return layout.scale_shape, layout.scales
    return tuple(param.shape), layout.moments


def _full(
    param: torch.Tensor,
    shape: tuple[int, ...],
    placements: Placements,
    value: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    device = local_of(param).device
    if not isinstance(param, DTensor):
        return torch.full(shape, value, dtype=dtype, device=device)
    mesh = param.device_mesh
    local = torch.full(local_shape(shape, mesh, placements), value, dtype=dtype, device=device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
