"""Parameters that are DTensors already: on other axes, as TP's and EP's, or on all of a mesh.

Note: on other axes than those that fully_shard cuts along, a parameter is local there: gradients
are each rank's own, to be averaged. On all axes it is placed there too, as a plan over the whole
mesh has it, and so are its gradients: what they still lack is what their placements say. An axis of
ours that flattens several of a parameter's is these, and our two axes, of HSDP, may be one of its.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from dbuffer import Inner
from ragged_shard import RaggedShard, dim_of, even_shape

__all__ = ["Placed", "inner_block", "placed_of"]


@dataclass(frozen=True, eq=False)
class Placed:
    """How a parameter lies that is a DTensor.

    Attributes:
        inner: on the axes that fully_shard does not cut along; None if there are none.
        shape: of what this rank has, whole along the axes that it cuts along.
        spec: of the unsharded parameter.
        own: which axes of the spec's mesh fully_shard cuts along or replicates over.
    """

    inner: Inner | None
    shape: tuple[int, ...]
    spec: DTensorSpec
    own: tuple[int, ...]

    def local_gradient(self, grad: DTensor) -> torch.Tensor:
        """This rank's term of the sum over the own axes; other axes are as the parameter's."""
        local, terms = grad._local_tensor, 1
        for axis in self.own:
            placement = grad.placements[axis]
            if not (isinstance(placement, Partial) and placement.reduce_op == "sum"):
                terms *= self.spec.mesh.size(axis)  # each rank has the mean, or the whole
        return local if terms == 1 else local / terms

    def gradient_placements(self, grad: DTensor) -> tuple[Placement, ...]:
        """As which it is to be reduced: on the own axes as it is, if it is not sharded there."""
        wanted = list(self.spec.placements)
        for axis in self.own:
            if isinstance(grad.placements[axis], Partial):
                wanted[axis] = grad.placements[axis]
        return tuple(wanted)


def placed_of(param: DTensor, mesh: DeviceMesh, name: str) -> Placed:
    """How a parameter lies beside the axes that fully_shard cuts along.

    Args:
        param: on other axes of the mesh that `mesh` is a part of, or on these and others.
        mesh: of fully_shard.
        name: of the parameter, for errors.

    Raises:
        ValueError: the axes have no names, belong to different meshes, or are some of ours; the
            others give ranks unequal parts.
    """
    ours, theirs = mesh.mesh_dim_names or (), param.device_mesh.mesh_dim_names or ()
    root, common = mesh._get_root_mesh(), set(ours) & set(theirs)
    same_root = root == param.device_mesh._get_root_mesh()
    flat = () if common or not same_root else _flattened(mesh, param.device_mesh)
    if not ours or not theirs or common not in (set(), set(ours)) or not same_root:
        raise ValueError(
            f"fully_shard: parameter {name!r} is a DTensor on axes {theirs} and the mesh has "
            f"{ours}; wants other axes of one named mesh, mesh['dp'] and mesh['tp'], or all of "
            f"them: slice both from it"
        )
    cut = flat or ours  # axes along which it will be
    placements = tuple(
        Replicate() if axis in cut else one
        for axis, one in zip(theirs, param.placements, strict=True)
    )
    ragged = any(isinstance(one, RaggedShard) for one in placements)
    shape = None if ragged else even_shape(param.shape, param.device_mesh.shape, placements)
    if shape is None:
        raise ValueError(
            f"fully_shard: parameter {name!r} of {tuple(param.shape)} is placed as {placements} on "
            f"axes {theirs} of {tuple(param.device_mesh.shape)} ranks; wants equal parts for all "
            f"of them, by Shard or InterleavedShard of a dim that they divide: pad it"
        )
    beside = {n: p for n, p in zip(theirs, placements, strict=True) if n not in cut}
    inner = None
    if beside:
        if flat and theirs[: len(flat)] != flat:
            raise ValueError(
                f"fully_shard: parameter {name!r} is a DTensor on axes {theirs} and the mesh's "
                f"{ours} is made of {flat}; wants these first in the mesh, before all others"
            )
        if flat:
            together = _with_flat(mesh, param.device_mesh, flat)
        else:
            together = root[tuple(n for n in root.mesh_dim_names or () if n in ours or n in theirs)]
        names = together.mesh_dim_names or ()
        others = tuple(beside[n] for n in names if n in beside)
        inner = Inner(together, others, tuple(param.shape))
    spec = DTensorSpec(param.device_mesh, placements, tensor_meta=param._spec.tensor_meta)
    own = tuple(axis for axis, axis_name in enumerate(theirs) if axis_name in cut)
    return Placed(inner, shape, spec, own)


def _flattened(mesh: DeviceMesh, other: DeviceMesh) -> tuple[str, ...]:
    """The axes of another mesh that ours has the ranks of, in one order; () if there are none.

    Torch keeps no record of it, so ranks are compared; axes of size 1 make no difference.
    """
    names = other.mesh_dim_names or ()
    here = other.get_coordinate()
    if here is None:
        return ()
    ranks = mesh.mesh.flatten()
    for number in range(1 if mesh.ndim > 1 else 2, other.ndim + 1):
        for axes in itertools.combinations(range(other.ndim), number):
            index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(here))
            if torch.equal(other.mesh[index].flatten(), ranks):
                return tuple(names[axis] for axis in axes)
    return ()


def _with_flat(mesh: DeviceMesh, other: DeviceMesh, flat: Sequence[str]) -> DeviceMesh:
    """Another mesh, with ours in place of the axes that it flattens."""
    parts = []
    for name in other.mesh_dim_names or ():
        if name == flat[0]:
            parts.append(mesh)
        elif name not in flat:
            parts.append(other[name])
    return DeviceMesh._concatenate(parts)


def inner_block(placed: Placed, block: int) -> int:
    """The block that also keeps dims whole which other axes cut, counted in the local tensor."""
    for placement in placed.spec.placements:
        dim = dim_of(placement)
        if dim is not None and dim > 0:
            block = math.lcm(block, math.prod(placed.shape[dim:]))
    return max(1, min(block, math.prod(placed.shape)))
