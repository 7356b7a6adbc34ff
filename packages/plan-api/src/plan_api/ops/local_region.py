"""Modules that run on local tensors, as `torch.distributed.tensor.experimental.local_map` does.

What such a module computes is its own affair. What its gradients mean follows from how its inputs
and parameters are placed along each axis: where parameters are sharded, every rank has a part of
what an input contributes, so a replicated input's gradient is Partial; where inputs are sharded, a
replicated parameter's is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.fuse import Site
from plan_api.lowering.ir import Act, Moment, Op
from plan_api.lowering.resolve import is_inside
from plan_api.ops.expert_indices import Indices, install_indices
from plan_api.ops.factories import install_factory
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext
from plan_api.spec.axes import axis_names

__all__ = ["check_regions", "install_regions"]


def check_regions(ops: Iterable[Op]) -> None:
    """Refuses what cannot be inside of a module that runs on local tensors.

    Raises:
        ValueError: another site of the plan, or a parameter with phases, is inside.
    """
    ops = list(ops)
    regions = {op.path for op in ops if op.act is Act.LOCAL}
    for op in ops:
        parts = op.path.split(".")
        above = {".".join(parts[:count]) for count in range(len(parts))} - {op.path}
        inside = above & regions or ({op.path} & regions if op.moment.of_state else set())
        stays = op.act in (Act.ANNOTATE, Act.INDEX, Act.DISPATCH)
        if inside and op.moment is not Moment.INIT and not stays:
            raise ValueError(
                f"{op} is inside of {min(inside)!r}, which runs on local tensors (local()): there "
                f"parameters have phase INIT, and nothing is moved"
            )


def install_regions(
    model: nn.Module,
    sites: Iterable[Site],
    mesh: DeviceMesh,
    indices: Mapping[str, Sequence[Indices]],
) -> list[RemovableHandle]:
    """Hooks of modules that run on local tensors, or make tensors that are to be DTensors.

    They come after those that move inputs and before those that move outputs.

    Args:
        model: its parameters are DTensors.
        sites: of a plan.
        mesh: the plan's.
        indices: by module, what it counts as its own.
    """
    handles = []
    for site in sites:
        for step in site.steps:
            placements = {axis: move.dst for axis, move in step.moves.items()}
            module = model.get_submodule(site.path)
            if step.act is Act.LOCAL:
                counted = [
                    one
                    for path, those in indices.items()
                    for one in those
                    if is_inside(path, site.path)
                ]
                at = StepContext(site.path or "the model", step)
                handles += _install_local(module, placements, mesh, site.path, counted, at)
            elif step.act is Act.FACTORY:
                handles += install_factory(module, placements, mesh)
    for path, those in indices.items():
        handles += install_indices(model.get_submodule(path), those, mesh, path)
    return handles


def _install_local(
    module: nn.Module,
    outputs: Mapping[str, Placement],
    mesh: DeviceMesh,
    path: str,
    indices: Sequence[Indices],
    at: StepContext,
) -> list[RemovableHandle]:
    """Makes a module, with all that is in it, see this rank's parts of tensors only.

    Args:
        module: its parameters are DTensors.
        outputs: how what it returns is placed, by axis; along others as the first DTensor given.
        mesh: the plan's.
        path: of the module, for messages.
        indices: arguments in it that count what each rank has of the parameters.
        at: the step of the plan, for messages.
    """
    axes = axis_names(mesh)
    placed = {axes.index(axis): placement for axis, placement in outputs.items()}
    region = _Region(module, placed, mesh, path, indices)
    return [
        module.register_forward_pre_hook(at.wrap(region.enter), with_kwargs=True),
        # Before hooks that move what it returns.
        module.register_forward_hook(at.wrap(region.leave), prepend=True, always_call=True),
    ]


class _Region:
    def __init__(
        self,
        module: nn.Module,
        outputs: Mapping[int, Placement],
        mesh: DeviceMesh,
        path: str,
        indices: Sequence[Indices],
    ) -> None:
        self._outputs, self._mesh, self._path = outputs, mesh, path
        self._whole = {axis for one in indices if not one.dispatch for axis in one.axes}
        self._cut_along = {axis for one in indices if one.dispatch for axis in one.axes}
        self._owners = [
            (owner, name) for owner in module.modules() for name in (*owner._parameters,)
        ]
        self._given: list[DTensor] = []

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._given = []
        map_tensors((args, kwargs), self._remember)
        params: list[tuple[nn.Module, str, Any]] = [
            (owner, name, owner._parameters[name]) for owner, name in self._owners
        ]
        params = [one for one in params if isinstance(one[2], DTensor)]
        cut_params = self._cut([param for _, _, param in params])
        cut_inputs = self._cut(self._given)
        for owner, name, param in params:
            # Found before the parameter is, which stays where optimizers and checkpoints look.
            owner.__dict__[name] = _local(param, cut_inputs)

        def to_local(tensor: torch.Tensor) -> torch.Tensor:
            return _local(tensor, cut_params) if isinstance(tensor, DTensor) else tensor

        local: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors((args, kwargs), to_local)
        return local

    def leave(self, module: nn.Module, _: Any, output: Any) -> Any:
        for owner, name in self._owners:
            owner.__dict__.pop(name, None)
        given, self._given = self._given, []
        if output is None:  # it has raised, or has nothing to place
            return None
        return map_tensors(output, lambda tensor: self._placed(tensor, given))

    def _remember(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                raise ValueError(
                    f"{self._path} runs on local tensors and was given {tensor._spec}: a part of a "
                    f"sum means nothing there; add shard('{self._path}.<in>', Replicate())"
                )
            for axis, name in enumerate(axis_names(self._mesh)):
                whole = tensor.placements[axis] == Replicate()
                if axis in self._cut_along and whole:
                    raise ValueError(
                        f"{self._path} dispatches tokens along {name!r}, and was given "
                        f"{tensor._spec}, which all ranks there have: each would send the same; "
                        f"say shard('{self._path}.<in:...>', Shard(0), {name!r}), or index() in "
                        f"place of dispatch(), by which each computes its own part of all"
                    )
                if axis in self._whole and not whole:
                    raise ValueError(
                        f"{self._path} has its parameters divided along {name!r}, so each rank "
                        f"needs all that is to be computed, and was given {tensor._spec}; add "
                        f"shard('{self._path}.<in:...>', Replicate(), {name!r})"
                    )
            self._given.append(tensor)
        return tensor

    def _cut(self, tensors: list[DTensor]) -> set[int]:
        """The axes along which any of these is sharded."""
        return {
            axis
            for tensor in tensors
            for axis, placement in enumerate(tensor.placements)
            if placement != Replicate()
        }

    def _placed(self, tensor: torch.Tensor, given: list[DTensor]) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        first = given[0].placements if given else (Replicate(),) * self._mesh.ndim
        placements = [self._outputs.get(axis, first[axis]) for axis in range(self._mesh.ndim)]
        like = next((one for one in given if one.ndim == tensor.ndim), None)
        shape = _global_shape(tensor, placements, self._mesh, like)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            tensor, self._mesh, placements, run_check=False, shape=shape, stride=stride
        )


def _local(tensor: DTensor, cut: set[int]) -> torch.Tensor:
    """This rank's part; its gradient is Partial where it is whole and what it meets is cut."""
    gradient = [
        Partial() if placement == Replicate() and axis in cut else placement
        for axis, placement in enumerate(tensor.placements)
    ]
    return tensor.to_local(grad_placements=gradient)


def _global_shape(
    tensor: torch.Tensor, placements: list[Placement], mesh: DeviceMesh, like: DTensor | None
) -> torch.Size:
    """Of uneven shards only an input of the same local size knows the whole."""
    shape = list(tensor.shape)
    for axis, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        shape[dim] *= mesh.size(axis)
        if like is None or like.placements[axis] != placement:
            continue
        if like._local_tensor.shape[dim] == tensor.shape[dim]:
            shape[dim] = like.shape[dim]
    return torch.Size(shape)
