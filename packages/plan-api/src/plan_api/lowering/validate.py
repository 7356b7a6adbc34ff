"""Refuses plans that do not fit a model, before anything is changed or communicated.

Here are all checks of a plan against a model, but those of names: `lower` reports the entries that
match nothing when it resolves them, and those of units, in `units`. Static mode has its own
requirements, in `plan_api.static.validate`; `plan_api.runtime.agreement` compares plans between
ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.expert_indices import (
    IndexingStep,
    expert_dim_sizes,
    experts_of_ranks,
    indexing_steps,
)
from plan_api.lowering.fully_shard import entry_for, is_sharded_by_plan
from plan_api.lowering.ir import (
    EntryRef,
    FullyShard,
    HookPoint,
    Op,
    OpKind,
    Override,
    PhasePlacements,
    Schedule,
    ShardValues,
)
from plan_api.lowering.model_names import is_inside, resolve_argument
from plan_api.spec.axes import axis_names
from plan_api.spec.fully_shard_package import find_fully_shard
from plan_api.spec.placements import format_placement
from plan_api.spec.policies import POLICIES, VALUES

__all__ = ["check_buckets", "check_cover", "check_overrides", "check_phases", "validate"]

_OF_PARAMETERS = (*POLICIES, *VALUES)


def validate(
    model: nn.Module,
    ops: Sequence[Op],
    schedules: Mapping[str, Schedule],
    fully_sharded: Mapping[str, FullyShard],
    values: Mapping[str, ShardValues],
    mesh: DeviceMesh,
    *,
    of_stage: bool = False,
) -> None:
    """Refuses what a plan asks for and a model, or another entry, does not allow.

    Args:
        model: any; it is not changed.
        ops: of the plan, those that apply.
        schedules: of parameters and buffers, by their first names.
        fully_sharded: modules that fsdp is applied to, by path.
        values: of options of fully_shard, by the first names of parameters.
        mesh: of the plan.
        of_stage: whether other entries of the plan apply to other stages of a pipeline.

    Raises:
        ValueError: names the entries, and the module or parameter.
        ModuleNotFoundError: the plan asks for fully_shard, and no package offers it.
    """
    for entry in dict.fromkeys(fully_sharded.values()):
        _check_replicate(entry, mesh)
        _check_options(entry, mesh)
    _check_policies_apply(model, schedules, fully_sharded, mesh)
    _check_phases_of_fully_sharded(ops, schedules, fully_sharded, mesh)
    _check_values(model, schedules, fully_sharded, values, mesh)
    _check_dtypes_of_fully_sharded(model, schedules, fully_sharded, mesh)
    _check_interleaved_dims(ops, schedules, mesh)
    _check_local_regions(ops)
    _check_orders(ops, of_stage=of_stage)
    _check_groups(ops, mesh)
    _check_key_value_heads(ops, model, mesh)
    _check_expert_modules(ops)
    _check_expert_indices(ops, model, schedules, mesh)


def check_overrides(overrides: Sequence[Override]) -> None:
    """Refuses a plan that overrides its own entries, under ``strict=True``.

    Raises:
        ValueError: names all of them.
    """
    if overrides:
        text = "\n".join(map(str, overrides))
        raise ValueError(
            f"strict=True: expected no overrides, got a plan that overrides itself:\n{text}"
        )


def check_phases(
    tensors: Mapping[str, torch.Tensor], phases: Mapping[str, PhasePlacements]
) -> None:
    """Refuses phases of buffers, and placements of a gradient that no phase has.

    Args:
        tensors: parameters and buffers, by name.
        phases: of those that the plan places, by their first names.

    Raises:
        ValueError: names the tensor.
    """
    for name, placed in phases.items():
        if not isinstance(tensors[name], nn.Parameter) and placed.phases != {HookPoint.INIT}:
            raise ValueError(f"{name} is a buffer: it is placed once, with phase INIT")
        if placed.gradient not in (placed.rest, placed.run):
            raise ValueError(
                f"the gradient of {name}: expected placements {_text(placed.rest)}, "
                f"which the optimizer takes, or {_text(placed.run)}, which backward "
                f"makes, got {_text(placed.gradient)}"
            )


def _text(placements: Iterable[Placement]) -> str:
    return f"({', '.join(map(format_placement, placements))})"


def check_cover(model: nn.Module, schedules: Mapping[str, Schedule]) -> None:
    """Refuses a plan with ``cover=True`` that places not every parameter.

    Raises:
        ValueError: names the parameters.
    """
    missing = [name for name, _ in model.named_parameters() if name not in schedules]
    if missing:
        raise ValueError(
            "cover=True: expected entries that place every parameter, got none for: "
            + ", ".join(missing)
        )


def check_buckets(
    bucket_mb: float | None, model: nn.Module, reduced_by_fsdp: frozenset[str]
) -> None:
    """Refuses a bucket size where there is no gradient to reduce in buckets.

    Args:
        bucket_mb: as in `parallelize`; None if not given.
        model: any.
        reduced_by_fsdp: the first names of parameters whose gradients fully_shard reduces.

    Raises:
        ValueError: buckets have a size, and there is no gradient for them.
    """
    if bucket_mb is None:
        return
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    if not any(name not in reduced_by_fsdp for name in trained):
        why = "fully_shard reduces all gradients" if trained else "no parameter requires a gradient"
        raise ValueError(
            f"parallelize: expected gradients for buckets, got bucket_mb={bucket_mb}, and "
            f"{why}; leave bucket_mb out"
        )


def _check_options(entry: FullyShard, mesh: DeviceMesh) -> None:
    """Refuses what the package would refuse once other parameters are placed."""
    check = getattr(find_fully_shard(entry.description), "check", None)
    if check is None:
        return
    given = dict(entry.options)
    divides = given.get("replicate", 1) != 1
    others = {"send_dtype": given["send_dtype"]} if "send_dtype" in given else {}
    try:
        check(
            placements=given.get("placements"),
            reshard_after_forward=given.get("reshard_after_forward"),
            ndim=2 if divides else 1 if given.get("flat") else len(entry.axes),
            ranks=_sharding_ranks(entry, mesh),
            other_axes=tuple(axis for axis in axis_names(mesh) if axis not in entry.axes),
            **others,
        )
    except ValueError as error:
        raise ValueError(f"{entry.description}: {error}") from None


def _sharding_ranks(entry: FullyShard, mesh: DeviceMesh) -> int:
    """Returns the number of ranks that one copy of the parameters is sharded over."""
    options = dict(entry.options)
    if options.get("flat"):
        return mesh[entry.axes].size() // int(options.get("replicate", 1))
    return mesh[entry.axes[-1]].size() // int(options.get("replicate", 1))


def _check_policies_apply(
    model: nn.Module,
    schedules: Mapping[str, Schedule],
    fully_sharded: Mapping[str, FullyShard],
    mesh: DeviceMesh,
) -> None:
    """Refuses policies of entries whose parameters the plan itself shards along the same axes."""
    applies: set[FullyShard] = set()
    left_out: dict[FullyShard, str] = {}  # with a parameter that the plan itself shards
    for name, _ in model.named_parameters():
        entry = entry_for(name, fully_sharded)
        if entry is None:
            continue
        if is_sharded_by_plan(name, entry, schedules, mesh):
            left_out.setdefault(entry, name)
        else:
            applies.add(entry)
    for entry, name in left_out.items():
        given = [option for option, one in entry.options if option in _OF_PARAMETERS and one]
        if given and entry not in applies:
            raise ValueError(
                f"{entry.description}: expected parameters that fully_shard shards, for "
                f"{' and '.join(given)}, got only such as {name}, which other entries shard along "
                f"{', '.join(entry.axes)}; leave {' and '.join(given)} out"
            )


def _check_values(
    model: nn.Module,
    schedules: Mapping[str, Schedule],
    fully_sharded: Mapping[str, FullyShard],
    values: Mapping[str, ShardValues],
    mesh: DeviceMesh,
) -> None:
    """Refuses granularities and forms that the package would refuse for a parameter."""
    for name, param in model.named_parameters():
        entry = entry_for(name, fully_sharded)
        if entry is None or name not in values:
            continue
        check = getattr(find_fully_shard(entry.description), "check_values", None)
        if check is None:
            return
        placements, axes = _placements_of(name, schedules, mesh), axis_names(mesh)
        others = [axis for axis in range(mesh.ndim) if axes[axis] not in entry.axes]
        given = {
            option: None if (one := getattr(values[name], option)) is None else one.make()
            for option in VALUES
        }
        try:
            check(
                name,
                param,
                [placements[axis] for axis in others],
                [mesh.size(axis) for axis in others],
                **given,
            )
        except ValueError as error:
            raise ValueError(f"{entry.description}: {error}") from None


def _placements_of(
    name: str, schedules: Mapping[str, Schedule], mesh: DeviceMesh
) -> tuple[Placement, ...]:
    """Returns the placements of a parameter while its module runs."""
    return schedules[name].run if name in schedules else (Replicate(),) * mesh.ndim


def _check_replicate(entry: FullyShard, mesh: DeviceMesh) -> None:
    options = dict(entry.options)
    replicate = options.get("replicate", 1)
    if replicate == 1:
        return
    ranks, is_one_axis = mesh[entry.axes].size(), len(entry.axes) == 1 or options.get("flat")
    if not is_one_axis or not isinstance(replicate, int) or replicate < 1 or ranks % replicate:
        raise ValueError(
            f"{entry.description}: expected replicate= on one axis, or on axes with flat=True, a "
            f"number of copies that divides its ranks; got {replicate!r} on axes {entry.axes} of "
            f"{ranks} ranks. To replicate on an axis of its own, name two axes and leave "
            f"replicate= out"
        )


def _check_phases_of_fully_sharded(
    ops: Iterable[Op],
    schedules: Mapping[str, Schedule],
    fully_sharded: Mapping[str, FullyShard],
    mesh: DeviceMesh,
) -> None:
    """Refuses parameters of fully sharded modules that have phases along the same axes."""
    axes = axis_names(mesh)
    entries = {op.entry.number: op.entry for op in ops}
    for name, schedule in schedules.items():
        entry = entry_for(name, fully_sharded)
        if entry is None:
            continue
        both = [
            axis
            for axis in entry.axes
            if schedule.rest[axes.index(axis)] != schedule.run[axes.index(axis)]
        ]
        if both:
            phases = "; ".join(entries[number].description for number in schedule.entries)
            raise ValueError(
                f"{entry.description}: expected no phases along {', '.join(both)} for {name}, "
                f"which fully_shard gathers and shards there itself, got {phases}; leave out one "
                f"of them"
            )


def _check_dtypes_of_fully_sharded(
    model: nn.Module,
    schedules: Mapping[str, Schedule],
    fully_sharded: Mapping[str, FullyShard],
    mesh: DeviceMesh,
) -> None:
    """Refuses mixed precision beside parameters that fully_shard leaves in another dtype."""
    for name, param in model.named_parameters():
        entry = entry_for(name, fully_sharded)
        if entry is None or not is_sharded_by_plan(name, entry, schedules, mesh):
            continue
        value = dict(entry.options).get("mp_policy")
        dtype = None
        # Without a cast of inputs that is for the caller, who may use autocast.
        if value is not None and (policy := value.make()).cast_forward_inputs:
            dtype = policy.param_dtype
        if param.is_floating_point() and dtype not in (None, param.dtype):
            raise ValueError(
                f"{entry.description}: expected no parameter that the plan shards along "
                f"{', '.join(entry.axes)}, as fully_shard leaves those in their dtype, and modules "
                f"get inputs in {dtype}, got {name} in {param.dtype}; shard it along another axis, "
                f"with an entry of fully_shard of its own, or pass cast_forward_inputs=False and "
                f"run the model under torch.autocast, or leave out mp_policy"
            )


def _check_interleaved_dims(
    ops: Iterable[Op], schedules: Mapping[str, Schedule], mesh: DeviceMesh
) -> None:
    """Refuses another axis on a dim that ragged-shard's InterleavedShard shards, in any phase."""
    axes = axis_names(mesh)
    entries = {op.entry.number: op.entry for op in ops}
    for name, schedule in schedules.items():
        for placements in dict.fromkeys((schedule.rest, schedule.run)):
            by_dim: dict[int, list[str]] = {}
            for axis, placement in zip(axes, placements, strict=True):
                if (dim := getattr(placement, "dim", None)) is not None:
                    by_dim.setdefault(dim, []).append(axis)
            for placement in placements:
                own_dim: int = getattr(placement, "dim", -1)
                along = by_dim.get(own_dim, [])
                if hasattr(placement, "interleaves") and len(along) > 1:
                    described = "; ".join(entries[one].description for one in schedule.entries)
                    raise ValueError(
                        f"{described}: expected one axis that shards dim {own_dim} of "
                        f"{name}, as {format_placement(placement)} shards each of its parts, got "
                        f"{' and '.join(along)}; shard another dim along one of them, or apply "
                        f"fully_shard there"
                    )


def _regions(ops: Iterable[Op]) -> set[str]:
    """Returns the paths of modules that run on local tensors."""
    return {op.path for op in ops if op.kind is OpKind.LOCAL}


def _check_local_regions(ops: Sequence[Op]) -> None:
    """Refuses sites and parameter phases inside modules that run on local tensors."""
    regions = _regions(ops)
    for op in ops:
        parts = op.path.split(".")
        above = {".".join(parts[:count]) for count in range(len(parts))} - {op.path}
        inside = above & regions or ({op.path} & regions if op.hook_point.is_phase else set())
        allowed = op.kind in (OpKind.ANNOTATE, OpKind.INDEX, OpKind.DISPATCH)
        # A parameter of which each rank takes a part, such as a bias of Partial outputs.
        allowed |= op.hook_point is HookPoint.RUN and (op.src, op.dst) == (Replicate(), Partial())
        if inside and op.hook_point is not HookPoint.INIT and not allowed:
            raise ValueError(
                f"{op} is inside of {min(inside)!r}, which runs on local tensors (local()): "
                f"parameters there have phase INIT, and nothing is redistributed, but parameters "
                f"from Replicate() to Partial()"
            )


def _check_expert_modules(ops: Sequence[Op]) -> None:
    """Refuses indices into sharded parameters in modules that run on DTensors."""
    regions = _regions(ops)
    axes: dict[tuple[str, EntryRef], list[str]] = {}
    for op in ops:
        if op.kind in (OpKind.INDEX, OpKind.DISPATCH):
            axes.setdefault((op.path, op.entry), []).append(op.axis)
    for (path, entry), along in axes.items():
        if not any(is_inside(path, region) for region in regions):
            raise ValueError(
                f"{entry.description}: {path} runs on DTensors, whose indices are global; add "
                f"local({path!r}, Partial(), {', '.join(map(repr, along))})"
            )


def _check_expert_indices(
    ops: Sequence[Op], model: nn.Module, schedules: Mapping[str, Schedule], mesh: DeviceMesh
) -> None:
    """Refuses indices into parameters that are not sharded by expert, and two dispatches."""
    kinds: dict[str, list[OpKind]] = {}
    for indexing in indexing_steps(ops):
        entry, module = indexing.entry, model.get_submodule(indexing.path)
        number = _number_of_experts(indexing, model, schedules, mesh)
        of_ranks = experts_of_ranks(number, mesh, indexing.axes(mesh))
        if not of_ranks[-1]:
            raise ValueError(
                f"{entry.description}: expected at least one of {number} on each rank, got none on "
                f"the last of {len(of_ranks)} ranks, as torch.chunk splits them; shard them on "
                f"fewer ranks"
            )
        options = dict(entry.options)
        if indexing.step.kind is OpKind.DISPATCH:
            for argument in (options["tokens"], options["weights"]):
                if argument is not None:
                    resolve_argument(entry.description, indexing.path, module, argument)
            _check_overlap(indexing, model)
        _check_attributes(entry, module, number)
        others = kinds.setdefault(indexing.path, [])
        others.append(indexing.step.kind)
        if len(others) > 1 and OpKind.DISPATCH in others:
            raise ValueError(
                f"{entry.description}: expected one argument of {indexing.path} that indexes into "
                f"sharded parameters, got another one; tokens are dispatched by one"
            )


def _number_of_experts(
    indexing: IndexingStep, model: nn.Module, schedules: Mapping[str, Schedule], mesh: DeviceMesh
) -> int:
    """Returns the size of the expert dim, which the sharded parameters must have in common."""
    description, dim = indexing.entry.description, indexing.dim
    sizes = expert_dim_sizes(indexing, model, schedules, mesh)
    for name, size in sizes.other.items():
        if size in sizes.sharded.values():
            raise ValueError(
                f"{description}: dim {dim} of {name} has size {size} too, and is not sharded "
                f"like that of {', '.join(sizes.sharded)}: place it by Shard({dim}) along the same "
                f"axes, and no others"
            )
    if len(set(sizes.sharded.values())) != 1:
        found = ", ".join(f"{name} ({size})" for name, size in sizes.sharded.items()) or "none"
        raise ValueError(
            f"{description}: expected parameters of {indexing.path} sharded along dim {dim} on "
            f"these axes, all of one size, got: {found}"
        )
    return next(iter(sizes.sharded.values()))


def _check_overlap(indexing: IndexingStep, model: nn.Module) -> None:
    """Refuses to overlap a dispatch with what is no module beside the experts."""
    name = dict(indexing.entry.options).get("overlap")
    above, _, own = indexing.path.rpartition(".")
    beside = [one for one, _ in model.get_submodule(above).named_children() if one != own]
    if name is not None and (not own or name not in beside):
        raise ValueError(
            f"{indexing.entry.description}: overlap: expected the name of a module beside "
            f"{indexing.path or 'the model'}, {', '.join(map(repr, beside)) or 'of none'}, got "
            f"{name!r}"
        )


def _check_attributes(entry: EntryRef, module: nn.Module, number: int) -> None:
    """Refuses attributes that the module does not have, and a wrong number of experts."""
    options = dict(entry.options)
    count, flag = options["count"], options.get("flag")
    for name in (count, flag):
        if name is not None and not hasattr(module, name):
            raise ValueError(
                f"{entry.description}: {type(module).__name__} has no attribute {name!r}"
            )
    if count is not None and getattr(module, count) != number:
        raise ValueError(
            f"{entry.description}: count= expected the attribute with the number of experts, "
            f"{number}, got {count!r}, which is {getattr(module, count)!r}"
        )


def _check_orders(ops: Sequence[Op], *, of_stage: bool) -> None:
    """Refuses two orders of a sequence along one axis, and a reordered one without attention.

    Attention may be on other stages of a pipeline.
    """
    attended = {op.axis for op in ops if op.kind is OpKind.CONTEXT}
    for op in ops:
        if of_stage or op.kind is not OpKind.ORDER:
            continue
        if _order(op) != "contiguous" and op.axis not in attended:
            raise ValueError(
                f"{op.entry.description}: expected a context() entry along {op.axis!r}, without "
                f"which attention takes tokens in order {_order(op)!r} for neighbours, got none; "
                f"add context() for the modules with attention, or give order='contiguous'"
            )
    first_ops: dict[str, Op] = {}
    for op in ops:
        if op.kind not in (OpKind.CONTEXT, OpKind.ORDER):
            continue
        first = first_ops.setdefault(op.axis, op)
        if _order(first) != _order(op):
            raise ValueError(
                f"the sequence has two orders along {op.axis!r}: {first.entry.description} and "
                f"{op.entry.description}; all entries of an axis have one order"
            )


def _order(op: Op) -> str:
    order: str = dict(op.options)["order"]
    return order


def _check_key_value_heads(ops: Sequence[Op], model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuses key-value heads that Ulysses cannot divide among the ranks."""
    for op in ops:
        options = dict(op.options)
        if op.kind not in (OpKind.CONTEXT, OpKind.ORDER) or options.get("heads") is None:
            continue
        heads = _nested_integer(model.get_submodule(op.path), options["heads"], op.entry)
        degree = mesh.size(axis_names(mesh).index(op.axis))
        if options["method"] == "ulysses-ring":
            degree = options["ulysses_degree"]
        elif options["method"] != "ulysses":
            continue
        # Heads are divided along the axis, and along those that shard the projections to heads.
        axes = {op.axis: None} | {
            other.axis: None
            for other in ops
            if other.kind is OpKind.SHARD
            and is_inside(other.path, op.path)
            and dict(other.entry.options).get("unit") is not None
            and not other.dst.is_replicate()
        }
        names = axis_names(mesh)
        sizes = {axis: mesh.size(names.index(axis)) for axis in axes} | {op.axis: degree}
        if heads % math.prod(sizes.values()):
            along = " and ".join(f"{axis!r} of size {size}" for axis, size in sizes.items())
            raise ValueError(
                f"{op.entry.description}: {op.path} has {heads} key-value heads, which axis "
                f"{along} does not divide: method='ulysses' divides heads; use method='ring' or "
                f"'all-gather'"
            )


def _check_groups(ops: Sequence[Op], mesh: DeviceMesh) -> None:
    """Refuses an axis that groups of ranks, which shard heads, do not divide."""
    for op in ops:
        degree = dict(op.options).get("ulysses_degree")
        size = mesh.size(axis_names(mesh).index(op.axis))
        if op.kind is OpKind.CONTEXT and degree is not None and size % degree:
            raise ValueError(
                f"{op.entry.description}: expected a degree that divides the {size} ranks of axis "
                f"{op.axis!r}, got {degree}; give UlyssesRing a divisor of {size}"
            )


def _nested_integer(module: nn.Module, attribute: str, entry: EntryRef) -> int:
    found: Any = module
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, SupportsIndex):
        raise ValueError(
            f"{entry.description}: {type(module).__name__} has no integer {attribute!r}: heads= is "
            f"the name of the attribute with the number of key-value heads"
        )
    return operator.index(found)
