"""Which parameters the fsdp package will shard, and with which values of its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plan_api.lowering.ir import FullyShard, Lowered, Schedule, ShardValues
from plan_api.lowering.model_names import is_inside, suggest_names
from plan_api.spec.axes import axis_names
from plan_api.spec.entry import Entry
from plan_api.spec.param_values import ParamValues
from plan_api.spec.policies import VALUES, PolicyValue

__all__ = [
    "entry_for",
    "entry_with_values",
    "is_sharded_by_plan",
    "names_reduced_by_fsdp",
    "values_of_parameters",
]


def entry_for(name: str, entries: Mapping[str, FullyShard]) -> FullyShard | None:
    """Returns the entry of the innermost fully sharded module with a parameter, or None.

    Args:
        name: of the parameter.
        entries: by module path.
    """
    inside = [path for path in entries if is_inside(name, path)]
    return entries[max(inside, key=len)] if inside else None


def is_sharded_by_plan(
    name: str, entry: FullyShard, schedules: Mapping[str, Schedule], mesh: DeviceMesh
) -> bool:
    """Whether the plan itself shards a parameter along an entry's axes, while its module runs."""
    schedule, axes = schedules.get(name), axis_names(mesh)
    return schedule is not None and any(
        not schedule.run[axes.index(axis)].is_replicate() for axis in entry.axes
    )


def names_reduced_by_fsdp(
    model: nn.Module,
    entries: Mapping[str, FullyShard],
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
) -> frozenset[str]:
    """Returns the first names of the parameters whose gradients fully_shard reduces.

    Args:
        model: any.
        entries: by module path, the last that names it.
        schedules: of parameters, by their first names.
        mesh: of the plan.
    """
    first_names = {id(param): name for name, param in model.named_parameters()}
    found = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        entry, first = entry_for(name, entries), first_names[id(param)]
        if entry is not None and not is_sharded_by_plan(first, entry, schedules, mesh):
            found.add(first)
    return frozenset(found)


def values_of_parameters(
    model: nn.Module,
    entries: Mapping[str, FullyShard],
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
    *,
    of_stage: bool = False,
) -> dict[str, ShardValues]:
    """Resolves granularities, and the forms in which parameters are gathered, to parameters.

    Args:
        model: any; it is not changed.
        entries: by module path, the last that names it.
        schedules: of parameters, by their first names.
        mesh: of the plan.
        of_stage: whether other patterns may match parameters of other stages of a pipeline.

    Returns:
        the values of parameters that fully_shard manages and that have any, by their first names.

    Raises:
        ValueError: a pattern matches no parameter, or one that another matches; a function returned
            something else than a value of the package.
    """
    found: dict[str, ShardValues] = {}
    managed: dict[FullyShard, list[str]] = {entry: [] for entry in entries.values()}
    for name, param in model.named_parameters():
        entry = entry_for(name, entries)
        if entry is None or is_sharded_by_plan(name, entry, schedules, mesh):
            continue
        managed[entry].append(name)
        granularity, quantize = (
            _value_of(entry, dict(entry.options).get(option), name, param) for option in VALUES
        )
        values = ShardValues(granularity, quantize)
        if values != ShardValues():
            found[name] = values
    if not of_stage:
        _check_patterns(managed)
    return found


def _value_of(
    entry: FullyShard, given: object, name: str, param: nn.Parameter
) -> PolicyValue | None:
    if isinstance(given, ParamValues):
        return given.value_of(entry.description, name, param)
    assert given is None or isinstance(given, PolicyValue)
    return given


def _check_patterns(managed: Mapping[FullyShard, Sequence[str]]) -> None:
    """Refuses a pattern that matches no parameter of the entries that have it.

    Args:
        managed: the names of the parameters that each entry shards.
    """
    names_of: dict[tuple[str, ParamValues], list[str]] = {}
    first: dict[tuple[str, ParamValues], FullyShard] = {}
    for entry, names in managed.items():
        for option, given in entry.options:
            if isinstance(given, ParamValues):
                names_of.setdefault((option, given), []).extend(names)
                first.setdefault((option, given), entry)
    for (option, given), names in names_of.items():
        if unmatched := given.unmatched(names):
            raise ValueError(
                f"{first[option, given].description}: {option}: expected patterns of full names "
                f"of parameters that it shards, got {', '.join(map(repr, unmatched))}, which match "
                f"none{suggest_names(unmatched[0], names)}"
            )


def entry_with_values(entry: Entry, lowered: Lowered) -> Entry:
    """Returns an entry with the values that its functions returned for a model's parameters."""
    options = dict(entry.options)
    of_entry = {
        name: values
        for name, values in lowered.shard_values.items()
        if entry_for(name, lowered.fully_sharded) == FullyShard.of(entry)
    }
    for option, given in entry.options:
        if isinstance(given, ParamValues) and given.function is not None:
            found = {name: getattr(values, option) for name, values in of_entry.items()}
            options[option] = ParamValues.by_name(option, found)
    return replace(entry, options=tuple(options.items()))
