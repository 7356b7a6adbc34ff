"""Parameters that are DTensors on axes of the same root mesh as fully_shard's.

Note: a parameter that is a DTensor on axes other than those of fully_shard's mesh (TP, EP) is local
on those axes, and its gradients are each rank's own and are averaged. A parameter that is a DTensor
on all axes, as a plan over the whole mesh makes it, has gradients that are DTensors too: their
placements say what is still to be reduced, except with ``dp_mesh_dims``. fully_shard's axis may
flatten several axes of the parameter's mesh, and its two axes of HSDP may be one axis of the
parameter's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from dbuffer import Inner
from fsdp.mesh.annotations import Annotation
from ragged_shard import RaggedShard, dim_of, even_shape, largest_shape

__all__ = ["ParamPlacement", "block_on_inner_axes", "placement_of", "spec_with_dtype"]


@dataclass(frozen=True)
class GradConversion:
    """How a gradient becomes what is reduced over fully_shard's axes.

    Attributes:
        source: the gradient's placements.
        target: those to which it is redistributed first: the parameter's, and on fully_shard's axes
            Partial where it is Partial; None if it has these.
        terms: what the local gradient is divided by, to be this rank's term of the sum.
    """

    source: tuple[Placement, ...]
    target: tuple[Placement, ...] | None
    terms: int


@dataclass(frozen=True, eq=False)
class ParamPlacement:
    """The placement of a parameter that is a DTensor before it is sharded.

    Attributes:
        inner: placement on the axes that fully_shard does not shard along; None if there are none.
        shape: the largest of the ranks' local tensors once they are gathered along fully_shard's
            axes. Where other axes divide dim 0 unevenly, as vocabularies or experts, ranks of
            these have fewer rows, and still the same layout. Where they divide another dim
            unevenly, one rank has the whole local tensor.
        spec: of the unsharded parameter.
        fsdp_axes: the axes of the spec's mesh that fully_shard shards along or replicates over.
        annotation: of a plain parameter; None for DTensors. Forward computes with a plain tensor.
        is_averaged: whether gradients are averaged over these axes as they are, as FSDP2 does with
            ``dp_mesh_dims``, and not summed as their placements say.
        grad_spec: of the gradient, where the unsharded parameter is its local tensor; None where it
            is a DTensor.
    """

    inner: Inner | None
    shape: tuple[int, ...]
    spec: DTensorSpec
    fsdp_axes: tuple[int, ...]
    annotation: Annotation | None = None
    is_averaged: bool = False
    grad_spec: DTensorSpec | None = None
    _last_conversion: list[GradConversion] = field(default_factory=list, init=False, repr=False)

    @property
    def is_uneven(self) -> bool:
        """Whether other axes give ranks local tensors of different shapes."""
        mesh, meta = self.spec.mesh, self.spec.tensor_meta
        assert meta is not None
        return even_shape(meta.shape, mesh.shape, self.spec.placements) is None

    @property
    def sums_terms(self) -> bool:
        """Whether the gradient is the sum of what the ranks copy into their buffers."""
        return bool(self.fsdp_axes) and not self.is_averaged

    def with_local_grads(self, placements: Sequence[Placement], name: str) -> ParamPlacement:
        """Returns this placement for an unsharded parameter that is its local tensor.

        Args:
            placements: of the gradient, on the axes of the spec's mesh.
            name: of the parameter, for errors.

        Raises:
            ValueError: one is neither Partial nor the parameter's along its axis.
        """
        own = self.spec.placements
        if len(placements) != len(own) or any(
            not isinstance(grad, Partial) and grad != param
            for grad, param in zip(placements, own, strict=False)
        ):
            raise ValueError(
                f"fully_shard: grad_placements_fn: expected for each axis of parameter {name!r} "
                f"Partial, or the parameter's placement in {own}, got {tuple(placements)}"
            )
        meta = self.spec.tensor_meta
        return replace(self, grad_spec=DTensorSpec(self.spec.mesh, tuple(placements), meta))

    def annotated(self, annotation: Annotation) -> ParamPlacement:
        """Returns this placement for a plain parameter with an annotation."""
        meta = self.spec.tensor_meta
        grad_spec = DTensorSpec(self.spec.mesh, annotation.grad_placements, meta)
        return replace(self, annotation=annotation, grad_spec=grad_spec)

    def as_dtensor(self, grad: torch.Tensor) -> DTensor:
        """Returns a gradient as a DTensor; a local one is placed by `grad_spec`."""
        if isinstance(grad, DTensor):
            return grad
        return DTensor(grad, self.grad_spec, requires_grad=False)

    def grad_conversion(self, grad: torch.Tensor) -> GradConversion:
        """Returns how a gradient becomes what is copied into the buffer."""
        spec = grad._spec if isinstance(grad, DTensor) else self.grad_spec
        assert spec is not None, "a plain gradient has one"
        source, last = spec.placements, self._last_conversion
        if not last or last[0].source != source:  # in each step they are those of the step before
            last[:] = [self._conversion_from(source)]
        return last[0]

    def _conversion_from(self, source: tuple[Placement, ...]) -> GradConversion:
        target, terms = list(self.spec.placements), 1
        for axis in self.fsdp_axes:
            placement = source[axis]
            if isinstance(placement, Partial):
                target[axis] = placement
            is_term = isinstance(placement, Partial) and placement.reduce_op == "sum"
            if self.sums_terms and not is_term:
                terms *= self.spec.mesh.size(axis)  # every rank has the mean, or the whole gradient
        return GradConversion(source, None if tuple(target) == source else tuple(target), terms)


def placement_of(param: DTensor, mesh: DeviceMesh, name: str) -> ParamPlacement:
    """Returns the placement of a parameter on fully_shard's axes and the others of its root mesh.

    Args:
        param: on other axes of the root mesh of `mesh`, or on these and others.
        mesh: of fully_shard.
        name: of the parameter, for errors.

    Raises:
        ValueError: the axes have no names, belong to different root meshes, or are only some of
            fully_shard's; or a placement on another axis is ragged.
    """
    fsdp_names, names = mesh.mesh_dim_names or (), param.device_mesh.mesh_dim_names or ()
    root, common = mesh._get_root_mesh(), set(fsdp_names) & set(names)
    same_root = root == param.device_mesh._get_root_mesh()
    flattened: tuple[str, ...] = ()
    if same_root and common != set(fsdp_names):
        flattened = _flattened(mesh, param.device_mesh)
    mixed = common not in (set(), set(fsdp_names)) and not flattened
    if not fsdp_names or not names or mixed or not same_root:
        raise ValueError(
            f"fully_shard: parameter {name!r} is a DTensor on axes {names} and the mesh has "
            f"{fsdp_names}; expected other axes of one named mesh, mesh['dp'] and mesh['tp'], or "
            f"all of them: slice both from it"
        )
    fsdp_axes = flattened or fsdp_names
    placements = tuple(
        Replicate() if axis in fsdp_axes else placement
        for axis, placement in zip(names, param.placements, strict=True)
    )
    shape = _largest_shape(param, placements, name)
    others = {n: p for n, p in zip(names, placements, strict=True) if n not in fsdp_axes}
    inner = None
    if others:
        if flattened:
            first = names.index(flattened[0])
            if names[first : first + len(flattened)] != flattened:
                raise ValueError(
                    f"fully_shard: parameter {name!r} is a DTensor on axes {names} and the mesh's "
                    f"{fsdp_names} flattens {flattened}; expected axes that follow each other"
                )
            joined = _with_flattened(mesh, param.device_mesh, flattened)
        elif common:
            joined = param.device_mesh
        elif set(fsdp_names + names) <= set(root.mesh_dim_names or ()):
            joined = root[tuple(n for n in root.mesh_dim_names or () if n in fsdp_names + names)]
        else:  # slices of a mesh that was unflattened: the root has one axis of all ranks
            joined = DeviceMesh._concatenate([mesh, param.device_mesh])
        inner_placements = tuple(others[n] for n in joined.mesh_dim_names or () if n in others)
        inner = Inner(joined, inner_placements, tuple(param.shape))
    spec = DTensorSpec(param.device_mesh, placements, tensor_meta=param._spec.tensor_meta)
    numbers = tuple(axis for axis, axis_name in enumerate(names) if axis_name in fsdp_axes)
    return ParamPlacement(inner, shape, spec, numbers)


def _largest_shape(param: DTensor, placements: Sequence[Placement], name: str) -> tuple[int, ...]:
    """Returns the largest local shape of the ranks, for which all of them plan the layout."""
    sizes = param.device_mesh.shape
    if any(isinstance(placement, RaggedShard) for placement in placements):
        raise ValueError(
            f"fully_shard: parameter {name!r} of {tuple(param.shape)} is placed as "
            f"{tuple(placements)} on axes {param.device_mesh.mesh_dim_names} of {tuple(sizes)} "
            f"ranks; expected Shard or InterleavedShard on axes of others"
        )
    return largest_shape(param.shape, sizes, placements)


def _flattened(mesh: DeviceMesh, other: DeviceMesh) -> tuple[str, ...]:
    """Returns the axes of another mesh that this one flattens, in order; () if there are none.

    Torch keeps no record of it, so ranks are compared. Axes of size 1 make no difference to these:
    those between flattened axes count as flattened, too, and those beyond larger ones do not.
    """
    names = other.mesh_dim_names or ()
    coordinate = other.get_coordinate()
    if coordinate is None:
        return ()
    ranks = mesh.mesh.flatten()
    for number in range(1 if mesh.ndim > 1 else 2, other.ndim + 1):
        for axes in itertools.combinations(range(other.ndim), number):
            index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
            if torch.equal(other.mesh[index].flatten(), ranks):
                return tuple(names[axis] for axis in _adjacent(axes, other))
    return ()


def _adjacent(axes: Sequence[int], mesh: DeviceMesh) -> Sequence[int]:
    """Returns axes with those of size 1 between them, or without those of size 1 around others."""
    larger = [axis for axis in axes if mesh.size(axis) > 1]
    for some in (axes, larger):
        between = range(some[0], some[-1] + 1) if some else range(0)
        if between and all(axis in some or mesh.size(axis) == 1 for axis in between):
            return between
    return axes


def _with_flattened(mesh: DeviceMesh, other: DeviceMesh, flattened: Sequence[str]) -> DeviceMesh:
    """Returns another mesh with `mesh` in place of the axes that it flattens."""
    parts = []
    for name in other.mesh_dim_names or ():
        if name == flattened[0]:
            parts.append(mesh)
        elif name not in flattened:
            parts.append(other[name])
    return DeviceMesh._concatenate(parts)


def block_on_inner_axes(placement: ParamPlacement, block: int) -> int:
    """Returns a multiple of a block that does not split dims which other axes shard.

    Both are counted in elements of the local tensor. Where other axes divide a dim other than the
    first unevenly it is all of them. A rank with fewer rows has the begin of the layout's tensor,
    as rows are consecutive in storage; with shorter rows it would have others of them.
    """
    others = [Replicate() if dim_of(one) == 0 else one for one in placement.spec.placements]
    meta = placement.spec.tensor_meta
    assert meta is not None
    if even_shape(meta.shape, placement.spec.mesh.shape, others) is None:
        return max(1, math.prod(placement.shape))
    for one in placement.spec.placements:
        dim = dim_of(one)
        if dim is not None and dim > 0:
            block = math.lcm(block, math.prod(placement.shape[dim:]))
    return max(1, min(block, math.prod(placement.shape)))


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Returns a spec for a tensor of a dtype: operators derive their results' dtypes from it."""
    if spec.tensor_meta is None or spec.tensor_meta.dtype == dtype:
        return spec
    return replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
