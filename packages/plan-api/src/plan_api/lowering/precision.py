"""The linear layers and experts that a plan makes compute in low precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import ModulePolicy, Schedule
from plan_api.lowering.model_names import is_inside, suggest_names
from plan_api.ops.low_precision.experts import expert_weights, is_experts
from plan_api.ops.low_precision.recipes import Recipe
from plan_api.spec.entry import Entry, EntryKind

__all__ = ["names_layers", "resolve_precision"]


def resolve_precision(
    entries: Iterable[Entry],
    model: nn.Module,
    schedules: Mapping[str, Schedule] = MappingProxyType({}),
    mesh: DeviceMesh | None = None,
    mode: Literal["eager", "static"] = "eager",
    compiled: Mapping[str, ModulePolicy] = MappingProxyType({}),
) -> dict[str, ModulePolicy]:
    """Finds the linear layers and experts that entries name, with their recipes.

    Args:
        entries: of a plan; those of other kinds are ignored.
        model: any; it is not changed.
        schedules: of parameters, by their first names; none without a plan.
        mesh: of the plan.
        mode: of `parallelize`.
        compiled: the modules that torch.compile compiles, by path.

    Returns:
        the recipe of each linear layer and of each module of experts, by its first name.

    Raises:
        ValueError: an entry names no linear layer or experts; two name one with different recipes;
            the blocks of a recipe do not divide its features, or those of one rank, with the
            nearest numbers that they divide; or experts are compiled, or compute otherwise than by
            linear layers and grouped products.
    """
    first_names = {module: name for name, module in model.named_modules()}
    params = {id(param): name for name, param in model.named_parameters()}
    found: dict[str, ModulePolicy] = {}
    for entry in entries:
        if entry.kind is not EntryKind.PRECISION:
            continue
        policy = ModulePolicy(dict(entry.options)["recipe"], str(entry), entry.line)
        for module in _quantized_modules(entry, model):
            path = first_names[module]
            earlier = found.setdefault(path, policy)
            if earlier.value != policy.value:
                raise ValueError(
                    f"{policy.description}: expected one recipe for {path}, got another: "
                    f"{earlier.description}; leave one of them out"
                )
            if isinstance(module, nn.Linear):
                names = ["weight"]
            else:
                names = [*expert_weights(module)]
                _check_experts(policy, path, module, compiled)
            for name in names:
                weight = getattr(module, name)
                schedule = schedules.get(params[id(weight)])
                run = () if schedule is None else schedule.run
                _check_features(policy, path, name, weight, run, mesh, mode)
    return found


def names_layers(entry: Entry, model: nn.Module) -> bool:
    """Whether an entry names linear layers or experts of a model."""
    return any(_can_be_quantized(module) for _, module in _named(entry, model))


def _named(entry: Entry, model: nn.Module) -> list[tuple[str, nn.Module]]:
    modules = model.named_modules(remove_duplicate=False)
    return [(name, module) for name, module in modules if entry.path.matches(name)]


def _can_be_quantized(module: nn.Module) -> bool:
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return is_linear or is_experts(module)


def _quantized_modules(entry: Entry, model: nn.Module) -> list[nn.Module]:
    """Returns the linear layers and experts that an entry names; it may name others, too."""
    named = _named(entry, model)
    found = [module for _, module in named if _can_be_quantized(module)]
    if not named:
        names = [name for name, _ in model.named_modules()]
        raise ValueError(
            f"{entry.description}: no module has this name{suggest_names(entry.path.text, names)}"
        )
    if not found:
        name, module = named[0]
        raise ValueError(
            f"{entry.description}: expected linear layers or experts, such as "
            f"{_example(model)}, got {name or 'the model'}, a {type(module).__name__}; name "
            f"the torch.nn.Linear modules and those of experts themselves"
        )
    return found


def _example(model: nn.Module) -> str:
    names = (name for name, module in model.named_modules() if type(module) is nn.Linear)
    return next(names, "torch.nn.Linear(...)")


def _check_experts(
    policy: ModulePolicy, path: str, module: nn.Module, compiled: Mapping[str, ModulePolicy]
) -> None:
    around = next((one for name, one in compiled.items() if is_inside(path, name)), None)
    if around is not None:
        raise ValueError(
            f"{policy.description}: expected experts that are not compiled, as a graph has no "
            f"loop over experts in low precision, got {path} in {around.description}; leave out "
            f"one of the two"
        )
    way = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if way not in (None, "eager", "grouped_mm"):
        raise ValueError(
            f"{policy.description}: expected experts_implementation='eager' or 'grouped_mm' for "
            f"{path}, got {way!r}; set one of these in the model's config, or leave the experts "
            f"out of the pattern"
        )


def _check_features(
    policy: ModulePolicy,
    path: str,
    name: str,
    weight: torch.Tensor,
    placements: Sequence[Placement],
    mesh: DeviceMesh | None,
    mode: Literal["eager", "static"],
) -> None:
    recipe: Recipe = policy.value
    is_linear = weight.ndim == 2
    features = ["out_features", "in_features"]
    if not is_linear:
        features = [f"dim 1 of {name}", f"dim 2 of {name}"]
    for dim, what in enumerate(features, weight.ndim - 2):
        size, block, ranks = weight.shape[dim], recipe.feature_block, 1
        for axis, placement in enumerate(placements):
            if getattr(placement, "dim", None) == dim:  # InterleavedShard is no torch Shard
                assert mesh is not None
                # Of a fused projection each part is sharded.
                ranks *= mesh.size(axis) * getattr(placement, "interleaves", 1)
                is_fused = dim == 0 and hasattr(placement, "interleaves")
                if is_linear and mode == "eager" and not is_fused and type(placement) is not Shard:
                    raise ValueError(
                        f"{policy.description}: expected {path} sharded by Shard({dim}) in Eager, "
                        f"got {placement}; use mode='static', or leave the layer out"
                    )
        if block == 1 or not size % (block * ranks):
            continue
        step = block * ranks
        low, high = size // step * step, -(-size // step) * step
        nearest = f"{low} or {high}" if low else str(high)
        shards = f" on each of {ranks} ranks that shard them" if ranks > 1 else ""
        if not is_linear and ranks > 1:
            shards = f" in each of {ranks} parts of ranks"
        raise ValueError(
            f"{policy.description}: expected {what} of {path} in blocks of {block}{shards}, got a "
            f"weight of shape {tuple(weight.shape)}; the nearest that fits is {what}="
            f"{nearest}; leave the layer out of the pattern, or use another recipe"
        )
