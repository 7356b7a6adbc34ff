"""Plain parameters with annotations of spmd_types, which fully_shard stores as DTensors.

Note: such a parameter is this rank's part, a plain tensor, and its annotation says for each axis of
the mesh how the parts of the ranks belong together. It is sharded as the DTensor of the placement
in this table; forward computes with a plain tensor again, whose gradient is wrapped as:

    ==========  ==================  ============================
    annotation  placement           of the unsharded gradient
    ==========  ==================  ============================
    R           Replicate           Partial: it is reduced
    I           Replicate           Replicate
    S(dim)      Shard(dim)          Shard(dim)
    P           Partial             Replicate
    ==========  ==================  ============================

The axes of data parallelism are R, also where the annotation leaves them out.

Source: torch 2.14, torch/distributed/fsdp/_fully_shard/_fsdp_param.py; spmd_types,
docs/local_spmd_types.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fsdp._compat import DataParallelMeshDims

__all__ = ["Annotation", "SpmdMesh", "annotation_of", "no_typecheck", "typed_as_local"]


@dataclass(frozen=True, eq=False)
class SpmdMesh:
    """The mesh of all parallelism, and which of its axes are those of data parallelism."""

    mesh: DeviceMesh
    dims: DataParallelMeshDims


@dataclass(frozen=True, eq=False)
class Annotation:
    """What the annotation of a parameter says, on the mesh of all parallelism.

    Attributes:
        mesh: of all parallelism.
        placements: of the parameter, one for each axis.
        grad_placements: of its unsharded gradient.
        types: by axis of spmd_types, for the mesh on which modules compute.
        partition_spec: of the parameter; None if it has none.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    grad_placements: tuple[Placement, ...]
    types: Mapping[Any, Any]
    partition_spec: Any

    def dtensor(self, param: torch.Tensor) -> DTensor:
        """Returns a parameter as a DTensor in the same memory."""
        return DTensor.from_local(param.detach(), self.mesh, self.placements, run_check=False)

    def restore(self, param: torch.Tensor) -> None:
        """Annotates an unsharded parameter, while types are checked."""
        spmd = _type_checker()
        if self.types and spmd is not None:
            spmd.assert_type(param, dict(self.types), partition_spec=self.partition_spec)


def _spmd_types() -> Any:
    """Returns the module; None where nobody has imported it, and so nothing is annotated."""
    return sys.modules.get("spmd_types")


def _type_checker() -> Any:
    """Returns the module while it checks types; None otherwise."""
    spmd = _spmd_types()
    return None if spmd is None or not spmd.is_type_checking() else spmd


_CHECKS_NOTHING = nullcontext()  # one for all: there is a context around each hook


def no_typecheck() -> AbstractContextManager[Any]:
    """Returns a context in which spmd_types checks nothing: fully_shard's own operators."""
    spmd = _type_checker()
    context: AbstractContextManager[Any] = _CHECKS_NOTHING if spmd is None else spmd.no_typecheck()
    return context


def typed_as_local(function: type[torch.autograd.Function]) -> None:
    """Tells spmd_types that outputs of an autograd function have the types of its inputs."""
    spmd = _spmd_types()
    if spmd is not None:
        spmd.register_local_autograd_function(function)


def annotation_of(param: torch.Tensor, name: str, spmd_mesh: SpmdMesh | None) -> Annotation | None:
    """Returns what a parameter is annotated with; None for DTensors and without annotation.

    Args:
        param: of a module.
        name: of the parameter, for errors.
        spmd_mesh: None without ``dp_mesh_dims``.

    Raises:
        ValueError: there is no `spmd_mesh`; the annotation leaves out an axis of it, names others,
            or is not R along an axis of data parallelism.
    """
    spmd = _spmd_types()
    if spmd is None or isinstance(param, DTensor) or not spmd.get_local_type(param):
        return None
    if spmd_mesh is None:
        raise ValueError(
            f"fully_shard: spmd_types parameters require fully_shard() to be called with both a "
            f"named mesh= of all parallelism and dp_mesh_dims=DataParallelMeshDims(shard=..., "
            f"replicate=...), got neither for the annotated parameter {name!r}"
        )
    local_types: dict[Any, Any] = dict(spmd.get_local_type(param))
    partition_spec = spmd.get_partition_spec(param)
    types = dict(local_types)
    if partition_spec is not None:
        types |= sys.modules["spmd_types.types"].partition_spec_to_shard_types(partition_spec)
    mesh = spmd_mesh.mesh
    axes = {n: spmd.MeshAxis.of(mesh.get_group(n)) for n in mesh.mesh_dim_names or ()}
    compute_axes = _compute_axes(spmd, name, types, axes.values())
    data_parallel = (*spmd_mesh.dims.shard_names, *spmd_mesh.dims.replicate_names)
    by_axis = _on_storage_mesh(spmd, name, types, axes, data_parallel)
    to_placement = spmd.spmd_type_to_dtensor_placement
    return Annotation(
        mesh,
        tuple(to_placement(one) for one in by_axis),
        tuple(to_placement(one.backward_type()) for one in by_axis),
        {axis: local_types.get(axis, spmd.R) for axis in compute_axes},
        partition_spec,
    )


def _compute_axes(
    spmd: Any, name: str, types: Mapping[Any, Any], axes: Iterable[Any]
) -> tuple[Any, ...]:
    """Returns the axes on which modules compute: those of the annotation, or the current mesh's.

    Raises:
        ValueError: they do not have the ranks of the mesh of all parallelism.
    """
    axes = tuple(axes)
    if _spans(spmd, types) == _spans(spmd, axes):
        return tuple(types)
    current = spmd.current_mesh()
    if current is None:
        raise ValueError(
            f"fully_shard: parameter {name!r} has partial spmd_types annotations that cannot be "
            f"restored, on {tuple(types)} of the mesh's {axes}; annotate all axes, or call "
            f"fully_shard within spmd_types.set_current_mesh(...)"
        )
    unknown = [axis for axis in types if axis not in current and not _within(axis, axes)]
    if unknown or _spans(spmd, current) != _spans(spmd, axes):
        raise ValueError(
            f"fully_shard: parameter {name!r} uses spmd_types annotations on a typechecking mesh "
            f"that does not span the same ranks as its FSDP storage mesh: expected {axes}, got "
            f"{tuple(current)} and annotations on {tuple(types)}"
        )
    return tuple(current)


def _spans(spmd: Any, axes: Iterable[Any]) -> Any:
    """Returns one axis of all ranks that some axes have; None for one rank."""
    normalized = spmd.normalize_mesh(frozenset(axes))
    return _flattened(tuple(normalized)) if normalized else None


def _flattened(axes: tuple[Any, ...]) -> Any:
    return sys.modules["spmd_types._mesh_axis"].flatten_axes(axes)


def _within(axis: Any, axes: Iterable[Any]) -> bool:
    return bool(axis <= _flattened(tuple(axes)))


def _on_storage_mesh(
    spmd: Any,
    name: str,
    types: Mapping[Any, Any],
    axes: Mapping[str, Any],
    data_parallel: tuple[str, ...],
) -> list[Any]:
    """Returns the type along each axis of the mesh of all parallelism.

    Raises:
        ValueError: see `annotation_of`.
    """
    own = _flattened(tuple(axes[one] for one in data_parallel))
    others = {axis for n, axis in axes.items() if n not in data_parallel}
    for axis, one in types.items():
        if axis <= own:
            if one is not spmd.R:
                raise ValueError(
                    f"fully_shard: Expected spmd.R on FSDP DP axis {axis} for parameter {name!r} "
                    f"but got {one}: fully_shard reduces its gradients there"
                )
        elif axis not in others:
            raise ValueError(
                f"fully_shard: parameter {name!r} has spmd_types annotation on axis {axis}, which "
                f"is neither a non-FSDP storage-mesh axis nor contained in the FSDP DP mesh: "
                f"expected {sorted(set(axes) - set(data_parallel))}"
            )
    found, missing = [], []
    for n, axis in axes.items():
        # spmd_types drops axes of one rank.
        default = spmd.R if n in data_parallel or axis.size() == 1 else None
        found.append(default if n in data_parallel else types.get(axis, default))
        if found[-1] is None:
            missing.append(n)
    if missing:
        raise ValueError(
            f"fully_shard: parameter {name!r} has incomplete spmd_types annotations for FSDP "
            f"storage: expected one for each axis but {data_parallel}, got none for {missing}"
        )
    return found
