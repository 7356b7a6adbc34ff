"""Parameters that tensor or expert parallelism has placed already, on other axes of one mesh."""

from __future__ import annotations

import math

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dbuffer import Inner

__all__ = ["inner_block", "inner_of"]


def inner_of(param: DTensor, mesh: DeviceMesh, name: str) -> Inner:
    """Where a parameter lies beside the axes that fully_shard cuts along.

    Args:
        param: on axes of the mesh that `mesh` is a part of.
        mesh: of fully_shard.
        name: of the parameter, for errors.

    Raises:
        ValueError: the axes have no names, are the same, or belong to different meshes.
    """
    ours, theirs = mesh.mesh_dim_names or (), param.device_mesh.mesh_dim_names or ()
    root = mesh._get_root_mesh()
    same_root = root == param.device_mesh._get_root_mesh()
    if not ours or not theirs or set(ours) & set(theirs) or not same_root:
        raise ValueError(
            f"fully_shard: parameter {name!r} is a DTensor on axes {theirs} and the mesh has "
            f"{ours}; wants other axes of one named mesh: slice both from it, mesh['dp'] and "
            f"mesh['tp']"
        )
    names = tuple(n for n in root.mesh_dim_names or () if n in ours or n in theirs)
    placed = dict(zip(theirs, param.placements, strict=True))
    placements = tuple(placed[n] for n in names if n in placed)
    return Inner(root[names], placements, tuple(param.shape))


def inner_block(param: DTensor, block: int) -> int:
    """The block that also keeps dims whole which other axes cut, counted in the local tensor."""
    shape = param._local_tensor.shape
    for placement in param.placements:
        if isinstance(placement, Shard) and placement.dim > 0:
            block = math.lcm(block, math.prod(shape[placement.dim :]))
    return max(1, min(block, math.prod(shape)))
