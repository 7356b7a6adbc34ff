"""Applies fully_shard to a model in static mode, whose modules compute with plain tensors.

Between steps such a parameter is a DTensor, which optimizers and checkpoints have; while its module
runs it is the local tensor that the ranks of data parallelism have gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import Lowered, gradient_placements
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.local_shards import spec_with_dtype
from plan_api.runtime.policies.fully_shard import apply_fully_shard
from plan_api.spec.axes import axis_names
from plan_api.spec.fully_shard_package import find_fully_shard

__all__ = ["FullyShardedParams"]


class FullyShardedParams:
    """The parameters that fully_shard manages; it is applied to the modules of the plan.

    Args:
        model: its parameters are DTensors.
        lowered: the plan, lowered for this model.
        mesh: the plan's mesh.
        names: the first names of the parameters.
    """

    def __init__(
        self, model: nn.Module, lowered: Lowered, mesh: DeviceMesh, names: frozenset[str]
    ) -> None:
        self._entries, self._names = lowered.fully_sharded, names
        # Of those that are plain tensors while modules run.
        self._specs: dict[str, DTensorSpec] = {}
        self._grad_specs: dict[str, DTensorSpec] = {}
        annotated, axes = gradient_placements(lowered.sites), axis_names(mesh)
        name_of: dict[int, str] = {}
        for name, param in model.named_parameters():
            if name not in names or lowered.runs_on_dtensors(name):
                continue
            name_of[id(param)] = name
            schedule = lowered.schedules.get(name)
            run = (Replicate(),) * mesh.ndim if schedule is None else schedule.run
            grad = tuple(
                annotated.get(name, {}).get(axis, placement)
                for axis, placement in zip(axes, run, strict=True)
            )
            meta = param._spec.tensor_meta  # type: ignore[attr-defined]
            self._specs[name] = DTensorSpec(mesh, run, tensor_meta=meta)
            self._grad_specs[name] = DTensorSpec(mesh, grad, tensor_meta=meta)

        def grad_placements(param: nn.Parameter) -> tuple[Placement, ...] | None:
            name = name_of.get(id(param))
            return None if name is None else self._grad_specs[name].placements

        apply_fully_shard(
            model, self._entries, lowered.schedules, lowered.shard_values, mesh, grad_placements
        )

    def unsharded(self, model: nn.Module) -> AbstractContextManager[None]:
        """Gathers all parameters inside of the block, in which no gradients are reduced."""
        if not self._entries:
            return nullcontext()
        fully_shard: Any = find_fully_shard(next(iter(self._entries.values())).description)
        unsharded: AbstractContextManager[None] = fully_shard.unsharded(model)
        return unsharded

    def as_dtensors(self, model: nn.Module) -> Mapping[int, torch.Tensor]:
        """Returns parameters of Eager in the memory of unsharded ones, by the id of these.

        Args:
            model: whose parameters are unsharded.
        """
        return {
            id(param): nn.Parameter(
                DTensor(
                    param.detach(),
                    spec_with_dtype(self._specs[name], param.dtype),
                    requires_grad=False,
                ),
                requires_grad=param.requires_grad,
            )
            for name, param in model.named_parameters()
            if name in self._specs
        }

    def install_casts(self, shadow: nn.Module) -> Iterator[RemovableHandle]:
        """Makes a shadow model cast inputs and outputs as fully_shard does in mixed precision.

        Args:
            shadow: has none of the model's hooks.
        """
        for path, entry in self._entries.items():
            policy = dict(entry.options).get("mp_policy")
            if policy is None:
                continue
            made, module = policy.make(), shadow.get_submodule(path)
            if made.cast_forward_inputs and made.param_dtype is not None:
                cast = partial(_cast_inputs, made.param_dtype)
                yield module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
            if made.output_dtype is not None:
                yield module.register_forward_hook(partial(_cast_outputs, made.output_dtype))

    def gradients(
        self, model: nn.Module
    ) -> dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], DTensor]]]:
        """Returns the unsharded parameters, and what makes their gradients DTensors, by name.

        Args:
            model: whose parameters are unsharded.
        """
        return {
            name: (param, partial(self._grad_as_dtensor, name))
            for name, param in model.named_parameters()
            if name in self._names
        }

    def _grad_as_dtensor(self, name: str, grad: torch.Tensor) -> DTensor:
        if isinstance(grad, DTensor):  # of a module that runs on DTensors
            return grad
        return DTensor(
            grad, spec_with_dtype(self._grad_specs[name], grad.dtype), requires_grad=False
        )


def _cast_inputs(
    dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cast: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
        (args, kwargs), partial(_cast, dtype)
    )
    return cast


def _cast_outputs(dtype: torch.dtype, _: nn.Module, __: Any, output: Any) -> Any:
    return map_tensors(output, partial(_cast, dtype))


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
