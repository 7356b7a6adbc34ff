"""Shadow models: a second module tree over the same parameters, or over FakeTensors.

Eager runs on a shadow model beside static mode, so the model itself keeps its hooks and attributes.
A shadow model of FakeTensors takes no memory. What a model creates itself, such as positions and
masks, stays real and can be read; an operator that also takes a FakeTensor uses its shape only. So
no FakeTensorMode is active while the model runs, which would make DTensor's index arithmetic fake
too.

DTensor cannot view shards as heads of which ranks have different numbers (`lowering.units`). There
a shadow model has the parameters replicated, and computes all heads on every rank.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from plan_api._compat import ShapeMode
from plan_api.lowering.ir import Schedule, SiteStep, UnevenUnits
from plan_api.lowering.model_names import is_inside
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.redistribute import Redistribution

__all__ = [
    "FakeTensorFactory", "ReplicatedUnits", "class_before_fully_shard", "is_compiled", "is_fake",
    "shadow_of",
]  # fmt: skip

_HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


def shadow_of(
    model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> nn.Module:
    """Copies a module tree without its hooks and compiled code; tensors are shared, not copied.

    Args:
        model: any model; it is not changed.
        convert: returns the shadow model's tensor for each parameter and buffer, called once for
            tied ones; None: the same tensors.

    Returns:
        the shadow model; a module that occurs twice in the model occurs twice in it.
    """
    shadows: dict[int, nn.Module] = {}
    converted: dict[int, torch.Tensor] = {}

    def tensor_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or convert is None:
            return tensor
        if id(tensor) not in converted:
            converted[id(tensor)] = convert(tensor)
        return converted[id(tensor)]

    def shadow(module: nn.Module) -> nn.Module:
        while isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        if id(module) in shadows:
            return shadows[id(module)]
        new = shadows[id(module)] = _copy(module)
        attributes: dict[str, Any] = new.__dict__
        for registry, tensors in (
            ("_parameters", module._parameters),
            ("_buffers", module._buffers),
        ):
            for name in tensors:
                attributes.pop(name, None)  # a local parameter of static mode
            attributes[registry] = {name: tensor_of(tensor) for name, tensor in tensors.items()}
        attributes["_modules"] = {
            name: None if child is None else shadow(child)
            for name, child in module._modules.items()
        }
        attributes.update((name, OrderedDict()) for name in _HOOKS if name in attributes)
        # Its hooks that collect outputs are gone, and transformers is to install them again.
        attributes.pop("_output_capturing_hooks_installed", None)
        attributes["_compiled_call_impl"] = None
        for name, value in [*attributes.items()]:
            method = _uncompiled(value)
            if isinstance(method, types.MethodType) and method.__self__ is module:
                attributes[name] = types.MethodType(_uncompiled(method.__func__), new)
        return new

    return shadow(model)


def is_compiled(module: nn.Module) -> bool:
    """Whether `Plan.compile` or torch.compile has compiled a module or its forward."""
    own = vars(module).get("forward")
    function = own.__func__ if isinstance(own, types.MethodType) else own
    return (
        isinstance(module, torch._dynamo.OptimizedModule)
        or module._compiled_call_impl is not None
        or _uncompiled(function) is not function
    )


def _uncompiled(function: Any) -> Any:
    """Returns what `Plan.compile` or torch.compile has compiled; other values unchanged."""
    if not isinstance(function, types.FunctionType):
        return function
    of_torch = getattr(function, "_torchdynamo_orig_callable", function)
    return getattr(of_torch, "uncompiled", of_torch)


def class_before_fully_shard(module: nn.Module) -> type[nn.Module] | None:
    """Returns the class that a module had before fully_shard; None if that was not applied."""
    from torch.distributed.fsdp import FSDPModule  # 0.3 s, which importing plan-api does not take

    classes = type(module).__mro__
    return classes[classes.index(FSDPModule) + 1] if FSDPModule in classes else None


def _copy(module: nn.Module) -> nn.Module:
    """Copies a module; an FSDPModule, which cannot be copied, as one of its original class."""
    original = class_before_fully_shard(module)
    if original is None:
        return copy.copy(module)
    new = original.__new__(original)
    new.__dict__.update(module.__dict__)
    return new


class FakeTensorFactory:
    """Makes FakeTensors with the shapes of tensors.

    Args:
        device: the device type of the FakeTensors, such as a mesh's; the tensors may be on any
            device, ``meta`` included.
    """

    def __init__(self, device: str) -> None:
        self._mode, self._device = ShapeMode(), device

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a FakeTensor of the same shape, strides and dtype; of a parameter a parameter."""
        fake: torch.Tensor
        if isinstance(tensor, DTensor):
            detached: Any = tensor.detach()
            fake = DTensor.from_local(
                self.fake(detached.to_local()), tensor.device_mesh, tensor.placements,
                run_check=False, shape=tensor.shape, stride=tensor.stride(),
            )  # fmt: skip
        else:
            with self._mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
                )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        return fake

    def fake_inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a model's arguments with every tensor replaced by a FakeTensor."""
        return (
            tuple(map_tensors(arg, self.fake) for arg in args),
            {name: map_tensors(kwarg, self.fake) for name, kwarg in kwargs.items()},
        )


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or the local tensor of a DTensor, is a FakeTensor."""
    return isinstance(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, FakeTensor)


class ReplicatedUnits:
    """Replicates parameters that are sharded in uneven units.

    Args:
        uneven: of a lowered plan.
    """

    def __init__(self, uneven: Sequence[UnevenUnits]) -> None:
        self._regions = tuple(dict.fromkeys(one.region for one in uneven))
        self._axes = frozenset(one.axis for one in uneven)

    @property
    def exist(self) -> bool:
        """Whether ranks have different numbers of units anywhere."""
        return bool(self._axes)

    def is_replicated(self, path: str) -> bool:
        """Whether the outputs of a module differ, as Eager has all units on every rank."""
        return any(is_inside(path, region) for region in self._regions)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a parameter of Eager, gathered if it is sharded in units."""
        if not isinstance(tensor, DTensor) or not any(map(_has_units, tensor.placements)):
            return tensor
        detached: Any = tensor.detach()
        gathered: DTensor = detached.redistribute(placements=_without_units(tensor.placements))
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(gathered, tensor.requires_grad)
        return gathered

    def schedules(self, schedules: Mapping[str, Schedule]) -> dict[str, Schedule]:
        """Returns the schedules of parameters for Eager."""
        return {
            name: replace(
                schedule, rest=_without_units(schedule.rest), run=_without_units(schedule.run)
            )
            for name, schedule in schedules.items()
        }

    def redistribution(self, step: SiteStep, mesh: DeviceMesh, site: str) -> Redistribution:
        """Makes the transform of a step, from whatever placement Eager has along these axes."""
        moves = {
            axis: replace(move, src=None) if axis in self._axes else move
            for axis, move in step.moves.items()
        }
        return Redistribution(replace(step, moves=moves), mesh, site)


def _has_units(placement: Any) -> bool:
    return getattr(placement, "unit", 1) > 1


def _without_units(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if _has_units(one) else one for one in placements)
