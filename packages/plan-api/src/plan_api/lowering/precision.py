"""The linear layers that a plan makes compute in low precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import ModulePolicy, Schedule
from plan_api.lowering.model_names import suggest_names
from plan_api.ops.low_precision.recipes import Recipe
from plan_api.spec.entry import Entry, EntryKind

__all__ = ["resolve_precision"]


def resolve_precision(
    entries: Iterable[Entry],
    model: nn.Module,
    schedules: Mapping[str, Schedule] = MappingProxyType({}),
    mesh: DeviceMesh | None = None,
    mode: Literal["eager", "static"] = "eager",
) -> dict[str, ModulePolicy]:
    """Finds the linear layers that entries name, with their recipes.

    Args:
        entries: of a plan; those of other kinds are ignored.
        model: any; it is not changed.
        schedules: of parameters, by their first names; none without a plan.
        mesh: of the plan.
        mode: of `parallelize`.

    Returns:
        the recipe of each linear layer, by its first name.

    Raises:
        ValueError: an entry names no linear layer; two name one with different recipes; or the
            blocks of a recipe do not divide its features, or those of one rank. Names the nearest
            numbers that they divide.
    """
    first_names = {module: name for name, module in model.named_modules()}
    params = {id(param): name for name, param in model.named_parameters()}
    found: dict[str, ModulePolicy] = {}
    for entry in entries:
        if entry.kind is not EntryKind.PRECISION:
            continue
        policy = ModulePolicy(dict(entry.options)["recipe"], str(entry), entry.line)
        for module in _linear_layers(entry, model):
            path = first_names[module]
            earlier = found.setdefault(path, policy)
            if earlier.value != policy.value:
                raise ValueError(
                    f"{policy.description}: expected one recipe for {path}, got another: "
                    f"{earlier.description}; leave one of them out"
                )
            schedule = schedules.get(params[id(module.weight)])
            _check_features(
                policy, path, module, () if schedule is None else schedule.run, mesh, mode
            )
    return found


def _linear_layers(entry: Entry, model: nn.Module) -> list[nn.Linear]:
    """Returns the linear layers that an entry names; it may name other modules, too."""
    named = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if entry.path.matches(name)
    ]
    linear = [
        module
        for _, module in named
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    ]
    if not named:
        names = [name for name, _ in model.named_modules()]
        raise ValueError(
            f"{entry.description}: no module has this name{suggest_names(entry.path.text, names)}"
        )
    if not linear:
        name, module = named[0]
        raise ValueError(
            f"{entry.description}: expected linear layers, such as {_example(model)}, got "
            f"{name or 'the model'}, a {type(module).__name__}; name the torch.nn.Linear modules "
            f"themselves"
        )
    return linear


def _example(model: nn.Module) -> str:
    names = (name for name, module in model.named_modules() if type(module) is nn.Linear)
    return next(names, "torch.nn.Linear(...)")


def _check_features(
    policy: ModulePolicy,
    path: str,
    module: nn.Linear,
    placements: Sequence[Placement],
    mesh: DeviceMesh | None,
    mode: Literal["eager", "static"],
) -> None:
    recipe: Recipe = policy.value
    for dim, what in enumerate(("out_features", "in_features")):
        size, block, ranks = module.weight.shape[dim], recipe.feature_block, 1
        for axis, placement in enumerate(placements):
            if placement.is_shard(dim):
                assert mesh is not None
                ranks *= mesh.size(axis)
                if mode == "eager" and type(placement) is not Shard:
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
        raise ValueError(
            f"{policy.description}: expected {what} of {path} in blocks of {block}{shards}, got a "
            f"weight of shape {tuple(module.weight.shape)}; the nearest that fits is {what}="
            f"{nearest}; leave the layer out of the pattern, or use another recipe"
        )
