"""Redistributes tensors in the code of a model, where a plan has no hook.

The same call works on DTensors in Eager, and on local tensors in static mode and in modules that
run on local tensors (`Plan.local`).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.overrides import handle_torch_function, has_torch_function_unary

from plan_api._compat import no_compile
from plan_api.lowering.ir import AxisMove, OpKind, SiteStep
from plan_api.runtime.local_shards import ShardSizes
from plan_api.runtime.redistribute import Redistribution
from plan_api.spec.arguments import Placements, placements_per_axis
from plan_api.spec.axes import axis_names, resolve_axes
from plan_api.static.redistribute import StaticRedistribution

__all__ = ["CodeRedistribution", "apply_redistribution", "redistribute"]

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


@no_compile
def redistribute(
    tensor: torch.Tensor,
    src: Placements,
    dst: Placements,
    mesh: DeviceMesh,
    *,
    grad_src: Placements | None = None,
    grad_dst: Placements | None = None,
) -> torch.Tensor:
    """Redistributes a tensor in a model's own code, and its gradient in backward.

    A DTensor remains one, as in Eager: along other axes of its mesh it is placed as before. Any
    other tensor is taken as this rank's local tensor, as in static mode: it is replicated,
    sharded or Partial as ``src`` says, and all ranks along the axes have to call the function. Both
    send the same collectives, and return the same bits; the placements have the meaning of
    `Plan.redistribute`.

    ===========  ===========  =====================  =====================
    ``src``      ``dst``      forward                backward
    ===========  ===========  =====================  =====================
    Partial      Replicate    all-reduce             nothing
    Partial      Shard        reduce-scatter         all-gather
    Replicate    Shard        this rank's shard      all-gather
    Shard        Replicate    all-gather             ``grad_src`` to Shard
    Shard        Shard        all-to-all             all-to-all
    Replicate    Replicate    nothing                ``grad_src`` to ``grad_dst``
    ===========  ===========  =====================  =====================

    Megatron-LM's ``f`` (Shoeybi et al., arXiv 1909.08053, figure 3), before ranks compute different
    parts, is ``redistribute(x, Replicate(), Replicate(), mesh, grad_src=Partial(),
    grad_dst=Replicate())``, and its ``g`` is ``redistribute(x, Partial(), Replicate(), mesh)``.

    Args:
        tensor: of any shape and dtype, whose shards are even.
        src: the placements before, one, or one per axis of `mesh`.
        dst: the placements afterwards.
        mesh: the axes, as a mesh: ``mesh["tp"]``; of a DTensor, a sub-mesh of its mesh.
        grad_src: the placements of the gradient of the result; a local tensor that is gathered
            needs them: Partial if ranks compute different parts of what follows, else Replicate.
        grad_dst: the placements of the gradient afterwards; by default ``src``, and Replicate where
            that is Partial.

    Returns:
        the redistributed tensor, a DTensor if it was one.

    Raises:
        ValueError: an argument is no placement or mesh; a DTensor is not placed as ``src`` says, or
            is on another mesh; or a local tensor cannot be redistributed so, or not into even
            shards. Nothing has been sent.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"redistribute: expected a DeviceMesh with the axes, as mesh['tp'], got a "
            f"{type(mesh).__name__}"
        )
    frame = _calling_frame()
    call = _Call(
        mesh, _group_names(mesh), _hashable(src), _hashable(dst), _hashable(grad_src),
        _hashable(grad_dst), frame.f_code, frame.f_lineno,
    )  # fmt: skip
    if isinstance(tensor, DTensor):
        return apply_redistribution(tensor, _of_dtensors(call, tensor.device_mesh))
    return apply_redistribution(tensor, _of_local_tensors(call))


@dataclass(frozen=True)
class CodeRedistribution:
    """What a call of `redistribute` does.

    Attributes:
        step: the call, as a step of a plan.
        transform: what redistributes the tensor.
    """

    step: SiteStep
    transform: Redistribution | StaticRedistribution

    @property
    def reduces_gradient(self) -> bool:
        """Whether it expects a Partial gradient."""
        return any(isinstance(move.grad_src, Partial) for move in self.step.moves.values())


def apply_redistribution(tensor: torch.Tensor, redistribution: CodeRedistribution) -> torch.Tensor:
    """Redistributes a tensor; torch function modes see it, as those that trace or type a step.

    Args:
        tensor: of `redistribute`.
        redistribution: to apply.
    """
    if has_torch_function_unary(tensor):
        return handle_torch_function(apply_redistribution, (tensor,), tensor, redistribution)
    return redistribution.transform(tensor)


class _Call(NamedTuple):
    """A call in a model's code, as it is cached; the groups tell apart meshes that are equal."""

    mesh: DeviceMesh
    groups: tuple[str, ...]
    src: Placements | None
    dst: Placements | None
    grad_src: Placements | None
    grad_dst: Placements | None
    code: CodeType
    line: int

    def step(self, axes: tuple[str, ...]) -> SiteStep:
        """Returns the call as a step of a plan, along axes of these names."""
        file = Path(self.code.co_filename).name
        what = f"redistribute:{file}:{self.line}"
        src, dst = (placements_per_axis(one, axes, what) for one in (self.src, self.dst))
        grad_src, grad_dst = (
            (None,) * len(axes) if one is None else placements_per_axis(one, axes, what)
            for one in (self.grad_src, self.grad_dst)
        )
        moves = map(AxisMove, dst, src, grad_dst, grad_src)
        by_axis = dict(zip(axes, moves, strict=True))
        return SiteStep(file, self.line, OpKind.REDIST, by_axis, ())


class _EvenSizes(ShardSizes):
    """Refuses uneven shards: a later call that gathers them would not know their global size."""

    def shard(self, axis: int, dim: int, length: int) -> int | None:
        if length % self.ranks(axis):
            raise ValueError(
                f"redistribute: expected a dim {dim} that {self.ranks(axis)} ranks divide, got one "
                f"of {length}; pad it, or redistribute the tensor by an entry of the plan"
            )
        return None


@lru_cache(maxsize=1024)
def _of_local_tensors(call: _Call) -> CodeRedistribution:
    step, sizes = call.step(axis_names(call.mesh)), _EvenSizes(call.mesh)
    return CodeRedistribution(
        step, StaticRedistribution(step, call.mesh, "redistribute", sizes=sizes)
    )


@lru_cache(maxsize=1024)
def _of_dtensors(call: _Call, mesh: DeviceMesh) -> CodeRedistribution:
    """Makes the redistribution of DTensors on a mesh that has the axes of the call's mesh."""
    step = call.step(resolve_axes(call.mesh, mesh, "redistribute"))
    return CodeRedistribution(step, Redistribution(step, mesh, "redistribute"))


def _calling_frame() -> FrameType:
    """Returns the frame that calls `redistribute`, behind those of `no_compile`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame


def _hashable(placements: Placements | None) -> Placements | None:
    return tuple(placements) if isinstance(placements, list) else placements


def _group_names(mesh: DeviceMesh) -> tuple[str, ...]:
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"redistribute: expected a rank of the mesh, which has ranks "
            f"{mesh.mesh.flatten().tolist()}, got rank {mesh.get_rank()}"
        )
    return tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))
