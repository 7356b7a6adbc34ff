"""Runs modules on local tensors, like `torch.distributed.tensor.experimental.local_map`.

The placements of gradients follow from those of inputs and parameters along each axis: where
parameters are sharded, every rank computes a part of what an input contributes, so the gradient of
a replicated input is Partial; where inputs are sharded, that of a replicated parameter is. A module
that communicates itself may make other gradients; the plan says which, by ``grad_src`` of an entry
for the input, and by `Plan.annotate` for the gradient of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import ExpertIndices, HookPoint, OpKind, Site, gradient_placements
from plan_api.lowering.model_names import argument_slot, is_inside, positional_names
from plan_api.ops.expert_indices import install_expert_indices
from plan_api.ops.factories import install_factory
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.hooks import get_argument, register_always_called, replace_argument
from plan_api.spec.axes import axis_names

__all__ = ["install_regions"]

_ByAxis: TypeAlias = Mapping[int, Placement]  # by the number of an axis
_NO_PLACEMENTS: _ByAxis = MappingProxyType({})


def install_regions(
    model: nn.Module,
    sites: Iterable[Site],
    mesh: DeviceMesh,
    indices: Mapping[str, Sequence[ExpertIndices]],
) -> list[RemovableHandle]:
    """Installs hooks of modules that run on local tensors, index into experts or create tensors.

    They run after the hooks that redistribute inputs and before those that redistribute outputs.

    Args:
        model: its parameters are DTensors.
        sites: of a plan.
        mesh: of the plan.
        indices: arguments that index into sharded parameters, by the path of their module.
    """
    handles = []
    sites = list(sites)
    for site in sites:
        for step in site.steps:
            placements = {axis: move.dst for axis, move in step.moves.items()}
            module = model.get_submodule(site.path)
            if step.kind is OpKind.LOCAL:
                inside = [
                    indexed_argument
                    for path, indexed_arguments in indices.items()
                    for indexed_argument in indexed_arguments
                    if is_inside(path, site.path)
                ]
                region = _LocalRegion(module, placements, mesh, site.path, inside, sites)
                handles += _install_local(
                    module, region, StepContext(site.path or "the model", step)
                )
            elif step.kind is OpKind.FACTORY:
                handles += install_factory(module, placements, mesh)
    for path, indexed_arguments in indices.items():
        handles += install_expert_indices(model, indexed_arguments, mesh, path)
    return handles


def _install_local(
    module: nn.Module, region: _LocalRegion, at: StepContext
) -> list[RemovableHandle]:
    return [
        module.register_forward_pre_hook(at.wrap(region.enter), with_kwargs=True),
        # It runs before the hooks that redistribute outputs.
        register_always_called(module, at.wrap(region.leave), prepend=True),
    ]


@dataclass(frozen=True)
class _RegionParam:
    """A parameter or buffer of a module that runs on local tensors.

    Attributes:
        owner: the module that has it.
        name: its name there.
        gradient: the placements of its gradient that the plan gives, by axis.
        shared_along: the axes whose ranks each take a part of it, for Partial outputs.
    """

    owner: nn.Module
    name: str
    gradient: _ByAxis
    shared_along: set[int]

    def find(self) -> torch.Tensor | None:
        """Returns what the module has now."""
        of = self.owner._parameters if self.name in self.owner._parameters else self.owner._buffers
        return of[self.name]


class _LocalRegion:
    """A module that runs on local tensors, with all modules inside it.

    Args:
        module: its parameters are DTensors.
        outputs: placements of its outputs, by axis; along others those of the first DTensor input.
        mesh: of the plan.
        path: of the module.
        indices: arguments inside it that index into sharded parameters.
        sites: of the plan.
    """

    def __init__(
        self,
        module: nn.Module,
        outputs: Mapping[str, Placement],
        mesh: DeviceMesh,
        path: str,
        indices: Sequence[ExpertIndices],
        sites: Sequence[Site],
    ) -> None:
        axes = axis_names(mesh)
        self._outputs = {axes.index(axis): placement for axis, placement in outputs.items()}
        self._mesh, self._path = mesh, path
        self._replicated_axes = {
            axis for index in indices if not index.dispatch for axis in index.axes
        }
        self._dispatched_axes = {axis for index in indices if index.dispatch for axis in index.axes}
        of_params, shared = gradient_placements(sites), _shared_params(sites)
        self._params = [
            _RegionParam(
                owner,
                name,
                _by_number(of_params.get(_joined(path, inner, name), {}), axes),
                {axes.index(one) for one in shared.get(_joined(path, inner, name), ())},
            )
            for inner, owner in module.named_modules()
            for name in (*owner._parameters, *owner._buffers)
        ]
        positional = positional_names(module)
        self._input_gradients = [
            (argument_slot(step.index, positional), _by_number(gradients, axes))
            for site in sites
            if site.path == path and site.hook_point is HookPoint.FORWARD_PRE
            for step in site.moved
            if (gradients := {a: m.grad_src for a, m in step.moves.items() if m.grad_src})
        ]
        self._inputs: list[DTensor] = []

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._inputs = []
        map_tensors((args, kwargs), self._remember)
        params: list[Any] = [one.find() for one in self._params]
        sharded_by_params = self._sharded_axes([one for one in params if isinstance(one, DTensor)])
        sharded_by_inputs = self._sharded_axes(self._inputs)
        for one, param in zip(self._params, params, strict=True):
            if isinstance(param, DTensor):
                # Attribute lookup finds this first; optimizers and checkpoints see the DTensor.
                own = _local(param, sharded_by_inputs - one.shared_along, one.gradient)
                one.owner.__dict__[one.name] = self._share(own, one.shared_along)

        def to_local(
            tensor: torch.Tensor, gradient: _ByAxis = MappingProxyType({})
        ) -> torch.Tensor:
            if isinstance(tensor, DTensor):
                return _local(tensor, sharded_by_params, gradient)
            return tensor

        for slot, gradient in self._input_gradients:
            value = map_tensors(
                get_argument(slot, args, kwargs), partial(to_local, gradient=gradient)
            )
            args, kwargs = replace_argument(slot, args, kwargs, value)
        local: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors((args, kwargs), to_local)
        return local

    def leave(self, module: nn.Module, _: Any, output: Any) -> Any:
        for one in self._params:
            one.owner.__dict__.pop(one.name, None)
        inputs, self._inputs = self._inputs, []
        if output is None:  # the module has raised, or returns nothing
            return None
        return map_tensors(output, lambda tensor: self._placed(tensor, inputs))

    def _share(self, param: torch.Tensor, axes: Iterable[int]) -> torch.Tensor:
        ranks = math.prod(self._mesh.size(axis) for axis in axes)
        shared: torch.Tensor = param if ranks == 1 else _Share.apply(param, ranks)  # type: ignore[no-untyped-call]
        return shared

    def _remember(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                raise ValueError(
                    f"{self._path} runs on local tensors: expected no Partial input, got "
                    f"{tensor._spec}; add shard('{self._path}.<in>', Replicate())"
                )
            for axis, name in enumerate(axis_names(self._mesh)):
                replicated = tensor.placements[axis] == Replicate()
                if axis in self._dispatched_axes and replicated:
                    raise ValueError(
                        f"{self._path} dispatches tokens along {name!r}: expected sharded tokens, "
                        f"got {tensor._spec}, of which each rank would send the same; add "
                        f"shard('{self._path}.<in:...>', Shard(0), {name!r}), or use index() "
                        f"instead of dispatch(), with which each rank computes its experts' part"
                    )
                if axis in self._replicated_axes and not replicated:
                    raise ValueError(
                        f"{self._path} has its experts sharded along {name!r}: expected replicated "
                        f"inputs, got {tensor._spec}; add "
                        f"shard('{self._path}.<in:...>', Replicate(), {name!r})"
                    )
            self._inputs.append(tensor)
        return tensor

    def _sharded_axes(self, tensors: list[DTensor]) -> set[int]:
        """Returns the axes along which any of these is sharded."""
        return {
            axis
            for tensor in tensors
            for axis, placement in enumerate(tensor.placements)
            if placement != Replicate()
        }

    def _placed(self, tensor: torch.Tensor, inputs: list[DTensor]) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        first = inputs[0].placements if inputs else (Replicate(),) * self._mesh.ndim
        placements = [
            _sharded_alike(self._outputs.get(axis, first[axis]), first[axis])
            for axis in range(self._mesh.ndim)
        ]
        like = next((one for one in inputs if one.ndim == tensor.ndim), None)
        shape = _global_shape(tensor, placements, self._mesh, like)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            tensor, self._mesh, placements, run_check=False, shape=shape, stride=stride
        )


def _sharded_alike(placement: Placement, other: Placement) -> Placement:
    """Returns the placement; of two that shard one dim the other.

    The rows of a batch and of sequences, both sharded, that have been flattened alternate among
    ranks (torch's _StridedShard, by the length of the batch), which an entry cannot say.
    """
    dim = getattr(placement, "dim", None)
    return other if dim is not None and dim == getattr(other, "dim", None) else placement


def _shared_params(sites: Iterable[Site]) -> dict[str, set[str]]:
    """Returns the axes along which modules take a part of a parameter, such as a bias."""
    found: dict[str, set[str]] = {}
    for site in sites:
        for step in site.steps:
            if site.hook_point is HookPoint.RUN and step.kind is OpKind.REDIST:
                found.setdefault(_joined(site.path, step.tensor), set()).update(step.moves)
    return found


class _Share(torch.autograd.Function):
    """Divides a replicated tensor by the number of ranks that sum it, which all have its gradient.

    DTensor has this redistribution, to Partial, for its own operators only.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: int) -> torch.Tensor:
        return tensor / ranks

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _local(tensor: DTensor, sharded_axes: set[int], gradient: _ByAxis) -> torch.Tensor:
    """Returns the local tensor.

    Args:
        tensor: to return it of.
        sharded_axes: where it is replicated along these, its gradient is Partial.
        gradient: the placements of its gradient that the plan gives.
    """
    placements = [
        gradient.get(
            axis,
            Partial() if placement == Replicate() and axis in sharded_axes else placement,
        )
        for axis, placement in enumerate(tensor.placements)
    ]
    return tensor.to_local(grad_placements=placements)


def _by_number(placements: Mapping[str, Placement], axes: Sequence[str]) -> _ByAxis:
    return {axes.index(axis): placement for axis, placement in placements.items()}


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _global_shape(
    tensor: torch.Tensor, placements: list[Placement], mesh: DeviceMesh, like: DTensor | None
) -> torch.Size:
    """Returns the global shape, for uneven shards from an input of the same local size."""
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
