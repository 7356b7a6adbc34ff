"""A DTensor in words, of what this rank knows: nothing is sent."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from plan_api.spec.axes import axis_names
from plan_api.spec.placements import format_placement

__all__ = ["shown"]


def shown(tensor: DTensor) -> str:
    """The whole tensor in a line, then its placements, then the part that is here."""
    mesh, local = tensor.device_mesh, tensor._local_tensor
    names, dtype = axis_names(mesh), str(tensor.dtype).removeprefix("torch.")
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    placed = ", ".join(
        f"{name}={format_placement(one)}"
        for name, one in zip(names, tensor.placements, strict=True)
    )
    at = mesh.get_coordinate()
    here = "not on this rank"
    if at is not None:
        here = ", ".join(f"{name}={number}" for name, number in zip(names, at, strict=True))
    lines = [
        f"DTensor {tuple(tensor.shape)} {dtype} on {local.device.type}, mesh {sizes}",
        f"placements {placed}",
        f"local {tuple(local.shape)} at {here}:",
        str(local.detach()),
    ]
    if tensor.grad_fn is not None:
        lines.append(f"made by {tensor.grad_fn.name()}")
    if tensor.is_leaf and tensor.grad is not None:
        lines.append("has a gradient: see .grad")
    return "\n".join(lines)
