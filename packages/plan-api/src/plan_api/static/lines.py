"""What a step of Eager has shown, as lines of a plan for static mode."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import HookPoint, Lowered, OpKind
from plan_api.lowering.model_names import is_inside
from plan_api.plan import Plan
from plan_api.spec.entry import Entry, EntryKind
from plan_api.spec.path import PathKind, generalize_numbers
from plan_api.static.record import Call, Passed, Placements, Record

__all__ = ["Said", "lines_of", "sizes_of", "written"]


@dataclass(frozen=True)
class Said:
    """One line of the plan that is made, of one module."""

    kind: str
    path: str
    tensor: str
    dst: Placements
    src: Placements | None = None
    grad_src: Placements | None = None
    grad_dst: Placements | None = None


def lines_of(model: nn.Module, lowered: Lowered, seen: Record) -> list[Said]:
    """What a record says of each module."""
    said = [*_of_sites(lowered, seen)]
    pinned = {one.path for one in said if _pins(one)}
    params = dict(model.named_parameters())
    said += _of_leaves(seen, lowered, pinned, params)
    said += _of_borders(seen, lowered, pinned)
    for name, placements in seen.params.items():
        if lowered.runs_on_dtensors(name):
            continue
        path, _, own = name.rpartition(".")
        summed = tuple(one if one.is_partial() else Replicate() for one in placements)
        if any(one.is_partial() for one in placements):
            said.append(Said("annotate", path, f"{own}.grad", summed))
    said += _of_operators(call for call in seen.calls if not lowered.runs_on_dtensors(call.path))
    for name, placements in seen.results.items():
        if any(_cuts(one) for one in placements):
            said.append(Said("annotate", "", f"<out:{name}>", placements))
    return said


def _of_sites(lowered: Lowered, seen: Record) -> Iterator[Said]:
    for site in lowered.sites:
        if not site.hook_point.is_module_hook or (
            not site.path and site.hook_point is HookPoint.FORWARD_PRE
        ):
            continue  # what the script gives is whole
        for step in site.moved:
            if step.kind is OpKind.ANNOTATE:  # is found again
                continue
            passed = seen.sites.get((site.name, step.index))
            if passed is None:
                continue
            kind = "in" if site.hook_point is HookPoint.FORWARD_PRE else "out"
            yield _moved(site.path, f"<{kind}:{step.index}>", passed)


def _moved(path: str, tensor: str, passed: Passed) -> Said:
    back = passed.back_before
    grad_src, grad_dst = [], []
    for axis, (src, dst) in enumerate(zip(passed.before, passed.after, strict=True)):
        came = back[axis] if back is not None else _backward(dst)
        grad_src.append(came)
        grad_dst.append(_backward(src))
    return Said(
        "redistribute", path, tensor, passed.after, passed.before, tuple(grad_src), tuple(grad_dst)
    )


def _backward(forward: Placement) -> Placement:
    """How the gradient of what is placed so is to be placed: a sum is made where it arises."""
    return forward if isinstance(forward, Shard) else Replicate()


def _cuts(placement: Placement) -> bool:
    return not placement.is_replicate() and not placement.is_partial()


def _pins(one: Said) -> bool:
    return one.grad_src is not None and any(source.is_partial() for source in one.grad_src)


def _of_leaves(
    seen: Record, lowered: Lowered, pinned: set[str], params: Mapping[str, Any]
) -> Iterator[Said]:
    """Gradients that become sums in a module, and parameters that it takes as parts of one."""
    sites = {(site.path, site.hook_point) for site in lowered.sites}
    for (path, index), passed in seen.inputs.items():
        out = seen.outputs.get(path)
        above = any(f"{path}.".startswith(f"{one}.") for one in pinned)
        known = lowered.runs_on_dtensors(path) or (path, HookPoint.FORWARD_PRE) in sites
        if passed.back_after is None or above or known:
            continue
        came = out.back_before if out is not None else None
        arises = [
            back.is_partial()
            and before.is_replicate()
            and not (came is not None and came[axis].is_partial())
            for axis, (before, back) in enumerate(
                zip(passed.before, passed.back_after, strict=True)
            )
        ]
        if any(arises):
            back = tuple(
                one if at else _backward(before)
                for one, at, before in zip(passed.back_after, arises, passed.before, strict=True)
            )
            yield _moved(path, f"<in:{index}>", Passed(passed.before, passed.before, back))
    for path, passed in seen.outputs.items():
        has_bias = f"{path}.bias" in params and not lowered.runs_on_dtensors(path)
        if has_bias and any(one.is_partial() for one in passed.before):
            taken = tuple(one if one.is_partial() else Replicate() for one in passed.before)
            yield Said("redistribute", path, "bias", taken, (Replicate(),) * len(taken))


def _of_borders(seen: Record, lowered: Lowered, pinned: set[str]) -> Iterator[Said]:
    """What enters modules that stay on DTensors, where no site says how."""
    for (path, index), passed in seen.inputs.items():
        if (
            path not in lowered.eager
            or (f"{path}.{HookPoint.FORWARD_PRE.value}", index) in seen.sites
        ):
            continue
        back = passed.back_after or tuple(map(_backward, passed.before))
        above = any(is_inside(path, one) for one in pinned)
        to = back if above else tuple(map(_backward, passed.before))
        if any(one != Replicate() for one in (*passed.before, *back)):
            yield Said(
                "redistribute", path, f"<in:{index}>", passed.before, passed.before, back, to
            )


def _of_operators(calls: Iterable[Call]) -> Iterator[Said]:
    for call in calls:
        if call.sizes or call.name in ("view", "reshape", "split"):
            continue
        if any(_cuts(one) for one in call.given):
            yield Said("annotate", call.path, f"<op:{call.name}:{call.number}>", call.given)


def sizes_of(lowered: Lowered, seen: Record) -> list[Said]:
    """Of shapes that code says: where a dim is cut, the size is taken for that of the whole."""
    said = []
    for call in seen.calls:
        if lowered.runs_on_dtensors(call.path):
            continue
        dims = [getattr(one, "dim", 0) for one in (call.result or call.given)]
        cut = tuple(Shard(dim) if dim in call.sizes and dim > 0 else Replicate() for dim in dims)
        if any(isinstance(one, Shard) for one in cut):
            said.append(Said("annotate", call.path, f"<op:{call.name}:{call.number}>", cut))
    return said


def written(plan: Plan, said: Iterable[Said], model: nn.Module) -> Plan:
    """What a plan says of parameters and of the script's inputs, and lines; alike layers in one."""
    new = Plan(plan.mesh, cover=plan.cover)
    new._entries = [one for one in plan.entries if _stays(one)]
    names = [name for name, _ in model.named_modules()]
    groups: dict[tuple[str, str, str], list[Said]] = {}
    for one in dict.fromkeys(said):
        groups.setdefault((one.kind, generalize_numbers(one.path), one.tensor), []).append(one)
    for (_, pattern, _), group in groups.items():
        alike = len({replace(one, path="") for one in group}) == 1
        everywhere = len(group) == sum(re.fullmatch(pattern, name) is not None for name in names)
        if alike and everywhere:
            _write(new, group[0], pattern)
        else:
            for one in group:
                _write(new, one, re.escape(one.path))
    return new


def _stays(entry: Entry) -> bool:
    kind = entry.path.kind
    of_script = kind is PathKind.INPUT and not entry.path.pattern
    counts = entry.kind in (EntryKind.INDEX, EntryKind.DISPATCH)
    return kind in (PathKind.STATE, PathKind.MODULE) or of_script or counts


def _write(plan: Plan, one: Said, pattern: str) -> None:
    separator = "." if one.tensor.startswith("<") else r"\."
    path = f"{pattern}{separator}{one.tensor}" if pattern else one.tensor
    if one.src is not None and one.tensor.startswith("<"):
        plan.redistribute(path, one.src, one.dst, grad_src=one.grad_src, grad_dst=one.grad_dst)
        return
    axes = [axis for axis, dst in zip(plan.axes, one.dst, strict=True) if dst != Replicate()]
    dst = [placement for placement in one.dst if placement != Replicate()]
    if one.src is not None:
        plan.redistribute(path, [Replicate()] * len(dst), dst, axes)
    else:
        plan.annotate(path, dst, axes)
