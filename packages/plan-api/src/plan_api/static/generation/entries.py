"""Turns the trace of a step of Eager into entries of a plan for static mode."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from plan_api.lowering.ir import HookPoint, Lowered, OpKind, Site, SiteStep
from plan_api.lowering.model_names import is_inside
from plan_api.plan import Plan
from plan_api.spec.entry import Entry, EntryKind
from plan_api.spec.path import PathKind, generalize_numbers
from plan_api.static.generation.tensor_uses import Place
from plan_api.static.generation.trace import EagerTrace, FunctionCall, Placements, TensorTrace
from plan_api.static.sites import axes_of_rows

__all__ = [
    "GeneratedEntry", "add_entries", "generate_entries", "generate_size_entries",
    "input_gradient_entries", "plan_with_entries", "redistribute_entry", "split_policies",
]  # fmt: skip

_POLICIES = (
    EntryKind.FULLY_SHARD, EntryKind.RECOMPUTE, EntryKind.COMPILE, EntryKind.PRECISION,
)  # fmt: skip
_RANDOM = ("dropout", "scaled_dot_product_attention")


@dataclass(frozen=True)
class GeneratedEntry:
    """One entry for one module; equal entries of numbered modules are merged later.

    Attributes:
        method: of `Plan`: ``redistribute`` or ``annotate``.
        path: of the module.
        tensor: its parameter, or its tensor as in ``<in:0>``.
        dst: see `Plan.redistribute`, a placement per mesh axis.
        src: the same; None along an axis: each mode finds it.
        grad_src: the same.
        grad_dst: the same.
        lines: the lines of the plan that ask for it; (): those where it is added.
    """

    method: str
    path: str
    tensor: str
    dst: Placements
    src: tuple[Placement | None, ...] | None = None
    grad_src: Placements | None = None
    grad_dst: Placements | None = None
    lines: tuple[str, ...] = field(default=(), compare=False)


def generate_entries(model: nn.Module, lowered: Lowered, trace: EagerTrace) -> list[GeneratedEntry]:
    """Returns the entries that static mode needs, for each module.

    Args:
        model: the model that was traced.
        lowered: its plan, lowered.
        trace: of a step.
    """
    entries = [*_site_entries(model, lowered, trace)]
    # Modules where the plan reduces the gradient: modules inside of them need not.
    reducing = {entry.path for entry in entries if _reduces_gradient(entry)}
    entries += input_gradient_entries(trace, lowered, reducing)
    entries += _bias_entries(trace, lowered, dict(model.named_parameters()))
    entries += _fallback_entries(trace, lowered, reducing)
    for name, placements in trace.params.items():
        if lowered.runs_on_dtensors(name):
            continue
        path, _, attribute = name.rpartition(".")
        partial = tuple(
            placement if placement.is_partial() else Replicate() for placement in placements
        )
        if any(placement.is_partial() for placement in placements):
            entries.append(GeneratedEntry("annotate", path, f"{attribute}.grad", partial))
    entries += _operator_entries(
        call for call in trace.calls if not lowered.runs_on_dtensors(call.path)
    )
    for name, placements in trace.results.items():
        if any(_is_shard(placement) for placement in placements):
            entries.append(GeneratedEntry("annotate", "", f"<out:{name}>", placements))
    return entries


def _site_entries(
    model: nn.Module, lowered: Lowered, trace: EagerTrace
) -> Iterator[GeneratedEntry]:
    for site in lowered.sites:
        if not site.hook_point.is_module_hook or (
            not site.path and site.hook_point is HookPoint.FORWARD_PRE
        ):
            continue  # the script's inputs are replicated
        for step in site.moved:
            if step.kind is OpKind.ANNOTATE:  # generated again from the trace
                continue
            traced = trace.sites.get((site.name, step.index))
            if traced is None:
                continue
            kind = "in" if site.hook_point is HookPoint.FORWARD_PRE else "out"
            entry = redistribute_entry(site.path, f"<{kind}:{step.index}>", traced, step.lines)
            yield _with_sums_of_rows(entry, model, lowered) if kind == "out" else entry


def _with_sums_of_rows(entry: GeneratedEntry, model: nn.Module, lowered: Lowered) -> GeneratedEntry:
    """Leaves out the placement of an embedding's output that DTensor has reduced in its code.

    It does where that scales the looked up rows, as Gemma's; on local tensors they are Partial.
    """
    assert entry.src is not None
    module = model.get_submodule(entry.path)
    if lowered.runs_on_dtensors(entry.path) or not isinstance(module, nn.Embedding):
        return entry
    rows = axes_of_rows(entry.path, model, lowered.schedules)
    src = (
        None if axis in rows and one is not None and not one.is_partial() else one
        for axis, one in enumerate(entry.src)
    )
    return replace(entry, src=tuple(src))


def _is_of_sequence(site: Site, step: SiteStep, traced: TensorTrace) -> bool:
    """Whether an entry of `Plan.sequence`, which stays in the plan, does all that a step has."""
    along = {
        move.dst
        for other in site.steps
        if other.kind is OpKind.ORDER and other.index == step.index
        for move in other.moves.values()
    }
    changed = {
        after for before, after in zip(traced.before, traced.after, strict=True) if before != after
    }
    return bool(along) and changed <= along


def redistribute_entry(
    path: str, tensor: str, traced: TensorTrace, lines: tuple[str, ...] = ()
) -> GeneratedEntry:
    """Returns the entry that redistributes a tensor as a step did, and reduces its gradient.

    Args:
        path: of the module.
        tensor: as in ``<in:0>``.
        traced: the tensor at this site.
        lines: of the plan.
    """
    grad_src, grad_dst = [], []
    for axis, (src, dst) in enumerate(zip(traced.before, traced.after, strict=True)):
        grad = traced.grad_before
        grad_src.append(grad[axis] if grad is not None else _reduced_gradient(dst))
        grad_dst.append(_reduced_gradient(src))
    return GeneratedEntry(
        "redistribute", path, tensor, traced.after, traced.before, tuple(grad_src), tuple(grad_dst),
        lines,
    )  # fmt: skip


def _reduced_gradient(placement: Placement) -> Placement:
    """Returns the gradient's placement for a tensor's, with a Partial reduced where it arises."""
    return placement if isinstance(placement, Shard) else Replicate()


def _is_shard(placement: Placement) -> bool:
    return not placement.is_replicate() and not placement.is_partial()


def _reduces_gradient(entry: GeneratedEntry) -> bool:
    return entry.grad_src is not None and any(one.is_partial() for one in entry.grad_src)


def input_gradient_entries(
    trace: EagerTrace, lowered: Lowered, reducing: Collection[str]
) -> Iterator[GeneratedEntry]:
    """Reduces gradients that become Partial inside of a module without children.

    Args:
        trace: of a step.
        lowered: the plan of the step.
        reducing: the modules at whose inputs the plan reduces gradients.
    """
    sites = {(site.path, site.hook_point) for site in lowered.sites}
    reduced = {
        user for shared in trace.tensors if trace.is_reduced(shared) for user in shared.users
    }
    for (path, index), traced in trace.inputs.items():
        output = trace.outputs.get(path)
        is_covered = Place(path, HookPoint.FORWARD_PRE, index) in reduced or any(
            f"{path}.".startswith(f"{one}.") for one in reducing
        )
        is_known = lowered.runs_on_dtensors(path) or (path, HookPoint.FORWARD_PRE) in sites
        if traced.grad_after is None or is_covered or is_known:
            continue
        output_grad = output.grad_before if output is not None else None
        becomes_partial = [
            grad.is_partial()
            and before.is_replicate()
            and not (output_grad is not None and output_grad[axis].is_partial())
            for axis, (before, grad) in enumerate(
                zip(traced.before, traced.grad_after, strict=True)
            )
        ]
        if any(becomes_partial):
            grads = tuple(
                grad if partial else _reduced_gradient(before)
                for grad, partial, before in zip(
                    traced.grad_after, becomes_partial, traced.before, strict=True
                )
            )
            moved = TensorTrace(traced.before, traced.before, grads)
            yield redistribute_entry(path, f"<in:{index}>", moved, lowered.lines_of(path))


def _bias_entries(
    trace: EagerTrace, lowered: Lowered, params: Mapping[str, Any]
) -> Iterator[GeneratedEntry]:
    """Makes a bias Partial where it is added to a Partial output."""
    for path, traced in trace.outputs.items():
        has_bias = f"{path}.bias" in params and not lowered.runs_on_dtensors(path)
        if has_bias and any(one.is_partial() for one in traced.before):
            dst = tuple(one if one.is_partial() else Replicate() for one in traced.before)
            yield GeneratedEntry("redistribute", path, "bias", dst, (Replicate(),) * len(dst))


def _fallback_entries(
    trace: EagerTrace, lowered: Lowered, reducing: set[str]
) -> Iterator[GeneratedEntry]:
    """Places the inputs of eager fallbacks that no site places."""
    for (path, index), traced in trace.inputs.items():
        site = (f"{path}.{HookPoint.FORWARD_PRE.value}", index)
        if path not in lowered.eager or site in trace.sites:
            continue
        reduced = tuple(map(_reduced_gradient, traced.before))
        grad_src = traced.grad_after or reduced
        grad_dst = grad_src if any(is_inside(path, one) for one in reducing) else reduced
        if any(one != Replicate() for one in (*traced.before, *grad_src)):
            yield GeneratedEntry(
                "redistribute", path, f"<in:{index}>", traced.before, traced.before, grad_src,
                grad_dst,
            )  # fmt: skip


def _operator_entries(calls: Iterable[FunctionCall]) -> Iterator[GeneratedEntry]:
    for call in calls:
        if call.sized_dims or call.name in ("view", "reshape", "split"):
            continue
        if any(_is_shard(input_placement) for input_placement in call.input_placements):
            tensor, placements = f"<op:{call.name}:{call.number}>", call.input_placements
            if call.name not in _RANDOM:  # where elements are makes no difference to a loss
                placements = tuple(map(_without_stride, placements))
            yield GeneratedEntry("annotate", call.path, tensor, placements)


def _without_stride(placement: Placement) -> Placement:
    """Returns the shard of a strided one, whose number of parts is of the example's batch."""
    return Shard(placement.dim) if isinstance(placement, _StridedShard) else placement


def generate_size_entries(lowered: Lowered, trace: EagerTrace) -> list[GeneratedEntry]:
    """Returns entries for sizes in the code, taken for global sizes where a dim is sharded."""
    entries = []
    for call in trace.calls:
        if lowered.runs_on_dtensors(call.path):
            continue
        placements = call.output_placements or call.input_placements
        dims = [getattr(placement, "dim", 0) for placement in placements]
        shards = tuple(
            Shard(dim) if dim in call.sized_dims and dim > 0 else Replicate() for dim in dims
        )
        if any(isinstance(shard, Shard) for shard in shards):
            tensor = f"<op:{call.name}:{call.number}>"
            entries.append(GeneratedEntry("annotate", call.path, tensor, shards))
    return entries


def plan_with_entries(plan: Plan, entries: Iterable[GeneratedEntry], model: nn.Module) -> Plan:
    """Returns a plan of the entries that a plan has for parameters and inputs, and of new ones.

    Args:
        plan: for Eager; its other entries are replaced by the new ones.
        entries: the new ones; equal ones of all layers become one entry with a pattern.
        model: the model of the plan.
    """
    new = Plan(plan.mesh, cover=plan.cover)
    new._entries = [entry for entry in plan.entries if _is_retained(entry)]
    add_entries(new, entries, model)
    return new


def add_entries(plan: Plan, entries: Iterable[GeneratedEntry], model: nn.Module) -> None:
    """Adds entries to a plan; equal ones of all layers become one entry with a pattern.

    Args:
        plan: is changed.
        entries: to add.
        model: the model of the plan.
    """
    names = [name for name, _ in model.named_modules()]
    groups: dict[tuple[str, str, str], list[GeneratedEntry]] = {}
    for one in dict.fromkeys(entries):
        groups.setdefault((one.method, generalize_numbers(one.path), one.tensor), []).append(one)
    for (_, pattern, _), group in groups.items():
        are_equal = len({replace(one, path="") for one in group}) == 1
        are_all = len(group) == sum(re.fullmatch(pattern, name) is not None for name in names)
        if are_equal and are_all:
            _add(plan, group[0], pattern)
        else:
            for one in group:
                _add(plan, one, re.escape(one.path))


def split_policies(plan: Plan) -> tuple[Plan, Plan]:
    """Returns the entries of a plan that apply to traced steps, and the others.

    These say how modules run, by fully_shard, recomputed, compiled or in low precision, and place
    no tensor.
    """
    others, policies = plan | Plan(plan.mesh), Plan(plan.mesh)
    for part, is_policy in ((others, False), (policies, True)):
        part._entries = [entry for entry in plan.entries if (entry.kind in _POLICIES) is is_policy]
    return others, policies


def _is_retained(entry: Entry) -> bool:
    kind = entry.path.kind
    is_model_input = kind is PathKind.INPUT and not entry.path.pattern
    is_own = entry.kind in (EntryKind.INDEX, EntryKind.DISPATCH, EntryKind.SEQUENCE)
    return kind in (PathKind.STATE, PathKind.MODULE) or is_model_input or is_own


def _add(plan: Plan, entry: GeneratedEntry, pattern: str) -> None:
    before = len(plan._entries)
    _add_call(plan, entry, pattern)
    if entry.lines:
        line = ", ".join(entry.lines)
        plan._entries[before:] = [replace(one, line=line) for one in plan._entries[before:]]


def _add_call(plan: Plan, entry: GeneratedEntry, pattern: str) -> None:
    separator = "." if entry.tensor.startswith("<") else r"\."
    path = f"{pattern}{separator}{entry.tensor}" if pattern else entry.tensor
    if entry.src is not None and entry.tensor.startswith("<"):
        _add_redistribution(plan, path, entry)
        return
    axes = [axis for axis, dst in zip(plan.axes, entry.dst, strict=True) if dst != Replicate()]
    dst = [placement for placement in entry.dst if placement != Replicate()]
    if entry.src is not None:
        plan.redistribute(path, [Replicate()] * len(dst), dst, axes)
    else:
        plan.annotate(path, dst, axes)


def _add_redistribution(plan: Plan, path: str, entry: GeneratedEntry) -> None:
    """Adds an entry for the axes along which the current placement is known, and one for others."""
    assert entry.src is not None
    known = {axis: src for axis, src in zip(plan.axes, entry.src, strict=True) if src is not None}

    def of_known(placements: Placements | None) -> list[Placement]:
        assert placements is not None
        return [one for axis, one in zip(plan.axes, placements, strict=True) if axis in known]

    if known:
        plan.redistribute(
            path, [*known.values()], of_known(entry.dst), [*known],
            grad_src=of_known(entry.grad_src), grad_dst=of_known(entry.grad_dst),
        )  # fmt: skip
    for axis, dst in zip(plan.axes, entry.dst, strict=True):
        if axis not in known:
            plan.shard(path, dst, axis)
