"""Finds the routers of transformers' mixtures of experts, and how ranks share their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import ExpertIndices, HookPoint, OpKind, Site
from plan_api.spec.axes import axis_names

__all__ = [
    "RouterTokens", "axes_of_loss", "check_before_parallelize", "router_tokens", "routers_of",
    "with_value",
]  # fmt: skip

# Names of transformers' classes end so; their outputs are logits, weights and choices of experts.
_ROUTER = "topkrouter"


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the routers of a model by their paths, in its order."""
    return {
        path: module
        for path, module in model.named_modules()
        if any(cls.__name__.lower().endswith(_ROUTER) for cls in type(module).__mro__)
    }


def check_before_parallelize(model: nn.Module, function: str, attribute: str) -> None:
    """Refuses a model to whose routers a function adds nothing.

    Args:
        model: any.
        function: name of the function, for messages.
        attribute: that the function sets on a model.

    Raises:
        ValueError: the model has no routers, has the attribute or has been parallelized.
    """
    if not routers_of(model):
        raise ValueError(
            f"{function}: expected a model with routers of transformers, classes that are named "
            f"...TopKRouter, got a {type(model).__name__} without any; leave the call out"
        )
    if attribute in vars(model):
        raise ValueError(
            f"{function}: expected a model that it was not called with, got one that has it "
            f"already; call it once"
        )
    if any(isinstance(one, DTensor) for one in model.parameters()):
        raise ValueError(
            f"{function}: expected an unmodified model, got one with DTensors; call it before "
            f"parallelize"
        )


@dataclass(frozen=True)
class RouterTokens:
    """How ranks share the tokens of a model's routers.

    Attributes:
        mesh: of the plan; None: each rank has all of them.
        sharding: numbers of the axes along which tokens are sharded where routers return plain
            tensors; DTensors have placements.
    """

    mesh: DeviceMesh | None = None
    sharding: frozenset[int] = frozenset()

    def axes(self, output: torch.Tensor) -> frozenset[int]:
        """Returns the axes along which ranks have different rows of a router's output."""
        if not isinstance(output, DTensor):
            return self.sharding
        return frozenset(axis for axis, one in enumerate(output.placements) if _shards_tokens(one))

    def local(self, output: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of a router's output."""
        if not isinstance(output, DTensor):
            return output
        placements = [one if _shards_tokens(one) else Replicate() for one in output.placements]
        return output.redistribute(placements=placements).to_local()

    def sum(self, local: torch.Tensor, axes: Iterable[int]) -> torch.Tensor:
        """Returns the sum over the ranks along some axes, without a gradient."""
        for axis in sorted(axes):
            assert self.mesh is not None
            local = funcol.all_reduce(local, "sum", (self.mesh, axis))
        return local


def router_tokens(
    sites: Iterable[Site], indices: Mapping[str, Sequence[ExpertIndices]], mesh: DeviceMesh
) -> RouterTokens:
    """Returns how the ranks of a plan share tokens.

    Args:
        sites: of the plan.
        indices: arguments that index into sharded parameters, by the path of their module.
        mesh: of the plan.
    """
    sites, axes = list(sites), axis_names(mesh)
    inputs = {
        axes.index(axis)
        for site in sites
        if not site.path and site.hook_point is HookPoint.FORWARD_PRE
        for step in site.moved
        for axis, move in step.moves.items()
        # Sequences that a stage of a pipeline gets sharded are gathered before routers.
        if _shards_tokens(move.dst)
        or (step.kind is not OpKind.ANNOTATE and getattr(move.dst, "dim", None) == 1)
    }
    dispatched = {
        axis
        for of_module in indices.values()
        for one in of_module
        if one.dispatch is not None
        for axis in one.axes
    }
    return RouterTokens(mesh, frozenset(inputs | dispatched | axes_of_loss(sites, mesh)))


def axes_of_loss(sites: Iterable[Site], mesh: DeviceMesh) -> set[int]:
    """Returns the axes along which a plan sums the loss that the model computes."""
    axes = axis_names(mesh)
    return {
        axes.index(axis)
        for site in sites
        if not site.path and site.hook_point is HookPoint.FORWARD
        for step in site.moved
        if step.index == "loss"
        for axis, move in step.moves.items()
        if move.src is not None and move.src.is_partial()
    }


def with_value(differentiable: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns a value with the gradient of another one."""
    return value + (differentiable - differentiable.detach())


def _shards_tokens(placement: Placement | None) -> bool:
    return getattr(placement, "dim", None) == 0
