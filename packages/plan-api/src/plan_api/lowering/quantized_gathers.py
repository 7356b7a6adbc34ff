"""Finds the sites that gather a sequence in front of linear layers in low precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.lowering.ir import (
    AxisMove,
    HookPoint,
    ModulePolicy,
    OpKind,
    QuantizedGather,
    Schedule,
    Site,
    SiteStep,
)
from plan_api.lowering.model_names import is_inside
from plan_api.ops.low_precision.recipes import Recipe
from plan_api.spec.axes import axis_names

__all__ = ["find_quantized_gathers"]


def find_quantized_gathers(
    sites: Iterable[Site],
    schedules: Mapping[str, Schedule],
    precisions: Mapping[str, ModulePolicy],
    excluded: Iterable[str],
    model: nn.Module,
    mesh: DeviceMesh,
) -> tuple[QuantizedGather, ...]:
    """Finds the inputs of modules that ranks quantize before they gather them.

    They gather a sequence along one axis, in front of linear layers that this axis shards on their
    output features and that all have one recipe. Other inputs are gathered in the dtype of compute,
    and quantized afterwards, to the same bits.

    Args:
        sites: of a plan.
        schedules: of parameters, by their first names.
        precisions: the recipes of linear layers, by path.
        excluded: modules that run as graphs, on local tensors, or again without their hooks.
        model: any; it is not changed.
        mesh: of the plan.
    """
    if not precisions:
        return ()
    sites, excluded = list(sites), tuple(excluded)
    found = []
    for site in sites:
        if site.hook_point is not HookPoint.FORWARD_PRE:
            continue
        if any(is_inside(site.path, one) or is_inside(one, site.path) for one in excluded):
            continue
        for step in site.moved:
            axis = _gathered_axis(step, mesh)
            if axis is None or sum(one.index == step.index for one in site.moved) > 1:
                continue
            layers = list(_layers(site, sites, schedules, axis, model, mesh))
            recipes = {_recipe(path, precisions) for path in layers}
            recipe = recipes.pop() if len(recipes) == 1 else None
            if recipe is not None:
                src = step.moves[axis].src
                assert isinstance(src, Shard)
                found.append(
                    QuantizedGather(
                        site.path, step.index, axis, src.dim, recipe, tuple(layers), step.lines
                    )
                )
    return tuple(found)


def _recipe(path: str, precisions: Mapping[str, ModulePolicy]) -> Recipe | None:
    policy = precisions.get(path)
    return None if policy is None else policy.value


def _gathered_axis(step: SiteStep, mesh: DeviceMesh) -> str | None:
    """Returns the only axis along which a step gathers a tensor whose gradient is summed."""
    axes = axis_names(mesh)
    moves = {
        axis: move
        for axis, move in step.moves.items()
        if move.src != move.dst or move.grad_src != move.grad_dst
    }
    if step.kind is not OpKind.REDIST or len(moves) != 1:
        return None
    ((axis, move),) = moves.items()
    return axis if _is_gather(move) and mesh.size(axes.index(axis)) > 1 else None


def _is_gather(move: AxisMove) -> bool:
    return (
        type(move.src) is Shard
        and move.dst == Replicate()
        and type(move.grad_src) is Partial
        and move.grad_src.reduce_op == "sum"
        and move.grad_dst in (None, move.src)
    )


def _layers(
    site: Site,
    sites: Iterable[Site],
    schedules: Mapping[str, Schedule],
    axis: str,
    model: nn.Module,
    mesh: DeviceMesh,
) -> Iterator[str]:
    """Yields the linear layers in a site's module that take what it gathers, as far as is known."""
    at = axis_names(mesh).index(axis)
    inner = [
        other.path
        for other in sites
        if other.hook_point is HookPoint.FORWARD_PRE
        and other.path != site.path
        and is_inside(other.path, site.path)
        and any(axis in step.moves for step in other.moved)
    ]
    for path, module in model.named_modules():
        schedule = schedules.get(f"{path}.weight")
        if (
            isinstance(module, nn.Linear)
            and is_inside(path, site.path)
            and schedule is not None
            and schedule.run[at].is_shard(0)
            and not any(is_inside(path, one) for one in inner)
        ):
            yield path
