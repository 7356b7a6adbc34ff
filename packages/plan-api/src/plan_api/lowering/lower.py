"""Lowers a plan for one model, without changing the model.

`lower` calls the stages in their order: it resolves the paths of the plan's entries to tensors and
modules of the model (here), resolves overrides, computes schedules of parameters and fuses sites
(`passes`), and validates the result (`validate`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from plan_api.lowering.expert_indices import expert_indices
from plan_api.lowering.fully_shard import values_of_parameters
from plan_api.lowering.ir import EntryRef, FullyShard, HookPoint, Lowered, Op, OpKind, Override
from plan_api.lowering.model_names import is_inside, named_state, resolve_argument, suggest_names
from plan_api.lowering.operands import values_with_operands
from plan_api.lowering.passes import fuse, phase_placements, resolve_overrides, schedules
from plan_api.lowering.policies import check_compiled, check_recomputed, resolve_policies
from plan_api.lowering.precision import resolve_precision
from plan_api.lowering.quantized_gathers import find_quantized_gathers
from plan_api.lowering.units import PlacedUnits, check_units, place_units
from plan_api.lowering.validate import check_cover, check_overrides, check_phases, validate
from plan_api.spec.entry import Entry, EntryKind
from plan_api.spec.path import PathKind, TensorPath
from plan_api.spec.plan_entries import PlanEntries

__all__ = ["lower"]

_OP_KINDS = {
    EntryKind.SHARD: OpKind.REDIST,
    EntryKind.REDISTRIBUTE: OpKind.REDIST,
    EntryKind.ANNOTATE: OpKind.ANNOTATE,
    EntryKind.FACTORY: OpKind.FACTORY,
    EntryKind.LOCAL: OpKind.LOCAL,
    EntryKind.INDEX: OpKind.INDEX,
    EntryKind.DISPATCH: OpKind.DISPATCH,
    EntryKind.CONTEXT: OpKind.CONTEXT,
    EntryKind.SEQUENCE: OpKind.ORDER,
}
_WITH_OPTIONS = (EntryKind.CONTEXT, EntryKind.FACTORY, EntryKind.SEQUENCE)
_OPTIONS = ("chunks", "overlap")  # of other kinds


def lower(
    plan: PlanEntries,
    model: nn.Module,
    *,
    strict: bool = False,
    mode: Literal["eager", "static"] = "eager",
) -> Lowered:
    """Resolves, validates and fuses a plan for a model, which is not changed.

    Args:
        plan: any.
        model: on any device, ``meta`` included.
        strict: whether an override is an error.
        mode: of `parallelize`. They differ where the axis does not divide units, such as heads:
            Eager refuses them, and in static mode ranks have different numbers of them.

    Raises:
        ValueError: the plan does not fit the model; see the message.
        ModuleNotFoundError: it has entries of fully_shard, and no installed package provides that.
    """
    ops, overrides = resolve_overrides(_resolve(plan, model))
    entries_of_modules = _resolve_fully_shard(plan, model)
    for entries in entries_of_modules.values():
        overrides += [
            Override(earlier, later) for earlier, later in pairwise(entries) if earlier != later
        ]
    if strict:
        check_overrides(overrides)
    phases = phase_placements(ops, plan.mesh)
    check_phases(dict(named_state(model)), phases)
    placed, eager = schedules(phases, plan.mesh), _resolve_eager(plan, model)
    units = PlacedUnits(tuple(ops), ())
    if mode == "static":
        units = place_units(ops, model, placed, plan.mesh, eager)
    else:
        check_units(ops, model, placed, plan.mesh)
    if units.uneven:
        ops = [*units.ops]
        placed = schedules(phase_placements(ops, plan.mesh), plan.mesh)
    if plan.cover:
        check_cover(model, placed)
    fully_sharded = {name: entries[-1] for name, entries in entries_of_modules.items()}
    values = values_of_parameters(model, fully_sharded, placed, plan.mesh, of_stage=plan.of_stage)
    recomputed = resolve_policies(plan, model, EntryKind.RECOMPUTE)
    check_recomputed(recomputed, placed, ops)
    compiled = resolve_policies(plan, model, EntryKind.COMPILE)
    check_compiled(compiled, recomputed, fully_sharded, placed, ops)
    precisions = resolve_precision(plan.entries, model, placed, plan.mesh, mode, compiled)
    values = values_with_operands(values, model, precisions, fully_sharded, placed, plan.mesh)
    validate(model, ops, placed, fully_sharded, values, plan.mesh, of_stage=plan.of_stage)
    sites = tuple(fuse(ops))
    regions = [op.path for op in ops if op.kind is OpKind.LOCAL]
    gathers = find_quantized_gathers(
        sites, placed, precisions, (*compiled, *regions, *eager), model, plan.mesh
    )
    return Lowered(
        tuple(ops),
        tuple(overrides),
        sites,
        MappingProxyType(placed),
        MappingProxyType(expert_indices(ops, model, placed, plan.mesh)),
        MappingProxyType(fully_sharded),
        MappingProxyType(values),
        eager,
        MappingProxyType(recomputed),
        MappingProxyType(compiled),
        MappingProxyType(precisions),
        gathers,
        units.uneven,
    )


@dataclass(frozen=True)
class _Location:
    """Where one entry applies: a module, a hook point, and a tensor there."""

    path: str
    hook_point: HookPoint
    tensor: str
    index: int | str


def _resolve(plan: PlanEntries, model: nn.Module) -> list[Op]:
    """Resolves the entries to operations on a model, in the order of the plan.

    Raises:
        ValueError: entries match nothing, a tensor has no such dim, or a ``forward`` no such
            argument; names all such entries, with suggestions.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    state = dict(named_state(model))
    first_names: dict[int, str] = {}  # of tied tensors
    for name, tensor in state.items():
        first_names.setdefault(id(tensor), name)
    ops, problems = [], []
    for number, entry in enumerate(plan.entries):
        names = state if _names_state(entry) else modules
        matched = [name for name in names if entry.path.matches(name)]
        if entry.path.kind is PathKind.GRADIENT:
            matched = [name for name in matched if isinstance(state[name], nn.Parameter)]
        if not matched:
            problems.append(_unmatched(entry, names))
            continue
        try:
            if names is state:
                matched = list(dict.fromkeys(first_names[id(state[name])] for name in matched))
                for name in matched:
                    _check_dims(entry, name, state[name])
            locations = [
                (located, _locate(located, name, modules))
                for located in (entry, *_shifted_entries(entry))
                for name in matched
            ]
        except ValueError as error:
            problems.append(str(error))
            continue
        if entry.kind in _OP_KINDS:
            source = EntryRef(number, entry.line, entry.description, entry.options)
            ops += [op for located, location in locations for op in _ops(located, source, location)]
    if problems:
        raise ValueError("the plan does not fit the model:\n" + "\n".join(problems))
    return ops


def _resolve_fully_shard(plan: PlanEntries, model: nn.Module) -> dict[str, tuple[FullyShard, ...]]:
    """Finds the modules that fsdp is applied to, each with its entries; the last one applies."""
    found: dict[str, tuple[FullyShard, ...]] = {}
    for entry in plan.entries:
        if entry.kind is EntryKind.FULLY_SHARD:
            fully_shard = FullyShard.of(entry)
            for name, _ in model.named_modules():
                if entry.path.matches(name):
                    found[name] = (*found.get(name, ()), fully_shard)
    return found


def _resolve_eager(plan: PlanEntries, model: nn.Module) -> tuple[str, ...]:
    """Finds the modules that stay on DTensors in static mode; none of them is inside another."""
    paths = [
        name
        for name, _ in model.named_modules()
        for entry in plan.entries
        if entry.kind is EntryKind.EAGER and entry.path.matches(name)
    ]
    return tuple(
        path
        for path in dict.fromkeys(paths)
        if not any(is_inside(path, other) for other in paths if other != path)
    )


def _ops(entry: Entry, source: EntryRef, location: _Location) -> Iterator[Op]:
    phase = entry.kind is EntryKind.SHARD and location.hook_point.is_phase
    kind = OpKind.SHARD if phase else _OP_KINDS[entry.kind]
    with_all = entry.kind in _WITH_OPTIONS
    options = tuple(one for one in entry.options if with_all or one[0] in _OPTIONS)
    for at, axis in enumerate(entry.axes):
        op = Op(
            location.path, location.hook_point, location.tensor, location.index, kind, axis,
            entry.dst[at],
            None if entry.src is None else entry.src[at],
            None if entry.grad_dst is None else entry.grad_dst[at],
            None if entry.grad_src is None else entry.grad_src[at],
            source, options,
        )  # fmt: skip
        yield op
        if kind is OpKind.ORDER and location.hook_point is HookPoint.FORWARD_PRE:
            # A sequence that enters is sharded too.
            yield replace(op, kind=OpKind.REDIST, options=())


def _locate(entry: Entry, name: str, modules: dict[str, nn.Module]) -> _Location:
    path = entry.path
    if entry.kind is EntryKind.FACTORY:
        return _Location(name, HookPoint.FORWARD_PRE, "<new>", 0)
    if entry.kind is EntryKind.CONTEXT:
        return _Location(name, HookPoint.FORWARD_PRE, "<attention>", 0)
    if entry.kind is EntryKind.LOCAL:
        return _Location(name, HookPoint.FORWARD, PathKind.OUTPUT.value, 0)
    if path.kind in (PathKind.STATE, PathKind.GRADIENT):
        module, _, tensor = name.rpartition(".")
        hook_point = HookPoint(entry.phase.value)
        if path.kind is PathKind.GRADIENT:
            hook_point = HookPoint.GRAD
        elif entry.kind is EntryKind.REDISTRIBUTE:
            hook_point = HookPoint.RUN
        return _Location(module, hook_point, tensor, 0)
    if path.kind is PathKind.OPERATOR:
        return _Location(name, HookPoint.OPERATOR, path.kind.value, path.index)
    if path.kind is PathKind.INPUT:
        index = resolve_argument(entry.description, name, modules[name], path.index)
        indexes = entry.kind in (EntryKind.INDEX, EntryKind.DISPATCH)
        tensor = "<index>" if indexes else path.kind.value
        return _Location(name, HookPoint.FORWARD_PRE, tensor, index)
    return _Location(name, HookPoint.FORWARD, path.kind.value, path.index)


def _shifted_entries(entry: Entry) -> Iterator[Entry]:
    """Yields the entry for the argument that takes shifted labels (`Plan.sequence`), if any."""
    options = dict(entry.options)
    shift = options.pop("shift", None)
    if shift is not None:
        path = replace(entry.path, index=shift)
        yield replace(entry, path=path, options=tuple(options.items()))


def _check_dims(entry: Entry, name: str, tensor: torch.Tensor) -> None:
    for placement in entry.dst:
        dim = getattr(placement, "dim", None)
        if isinstance(dim, int) and dim >= tensor.ndim:
            raise ValueError(
                f"{entry.description}: {name} has shape {tuple(tensor.shape)}: there is no dim "
                f"{dim}"
            )


def _unmatched(entry: Entry, names: Iterable[str]) -> str:
    what = "parameter or buffer" if _names_state(entry) else "module"
    suggestion = suggest_names(_without_regex(entry.path), names)
    return f"{entry.description}: no {what} has this name{suggestion}"


def _names_state(entry: Entry) -> bool:
    return entry.path.kind in (PathKind.STATE, PathKind.GRADIENT)


def _without_regex(path: TensorPath) -> str:
    """Turns a regular expression into the name that it resembles most."""
    text = re.sub(r"\\d[+*]?|\[0-9\][+*]?|\.\*", "0", path.pattern)
    return text.replace("\\", "")
