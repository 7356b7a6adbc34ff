"""A plan for static mode, found out by a step of Eager (veScale, section 6.2)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.entry import Entry
from plan_api.ir import Act, Moment
from plan_api.parallelize import Lowered, installed, parallelize
from plan_api.path import Kind
from plan_api.plan import Plan
from plan_api.static.compare import StaticError
from plan_api.static.record import Call, Passed, Placements, Record, record
from plan_api.static.twin import twin_of
from plan_api.verb import Verb

__all__ = ["generate_static"]

_RUNS = 4  # until what is said of gradients has settled


@dataclass(frozen=True)
class _Said:
    """One line of the plan that is made, of one module."""

    verb: str
    path: str
    tensor: str
    dst: Placements
    src: Placements | None = None
    grad_src: Placements | None = None
    grad_dst: Placements | None = None


def generate_static(
    plan: Plan, model: nn.Module, example_inputs: tuple[Any, ...] | Mapping[str, Any]
) -> Plan:
    """Makes a plan for static mode of one for Eager, by running steps of Eager.

    What is made says of each tensor that the plan moves what it is before, and of gradients; where
    a gradient would go on as a sum it is reduced where that begins, as Megatron-LM does it. It is
    an ordinary plan, and the same in Eager. It is tried: a static step has to give Eager's bits.

    Args:
        plan: for Eager.
        model: unmodified, or parallelized; it is not changed.
        example_inputs: of one step, as tuple of arguments or dict of keywords; all ranks of the
            mesh give the same.

    Returns:
        a plan that `parallelize(model, plan, mode="static")` takes.

    Raises:
        ValueError: static mode cannot do what the model does; names module and operator.
    """
    args, kwargs = (
        ((), example_inputs) if isinstance(example_inputs, Mapping) else (example_inputs, {})
    )
    made = plan
    for _ in range(_RUNS):
        eager = parallelize(twin_of(model), made, src_data_rank=None)
        lowered = installed(eager).lowered
        installed(eager).remove()
        seen = record(eager, lowered, plan.mesh, args, kwargs)
        before, made = made, _written(plan, _lines(eager, lowered, seen), model)
        if made.entries == before.entries:
            break
    return _tried(made, _of_sizes(seen), model, args, kwargs)


def _tried(
    plan: Plan,
    sizes: list[_Said],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Plan:
    """The plan, with lines of sizes that code says as of the whole, where it goes wrong without."""
    used: list[_Said] = []
    while True:
        static = twin_of(model)
        with_sizes = plan | _written(Plan(plan.mesh), used, model)
        try:
            parallelize(static, with_sizes, mode="static", guard_steps=0, src_data_rank=None)
            found = installed(static).check(*args, **kwargs)
        except ValueError as error:
            site = error.site if isinstance(error, StaticError) else ""
            more = _next(sizes, used, site) if isinstance(error, StaticError) else []
            if more:
                used += more
                continue
            raise ValueError(
                f"generate_static: {site or 'the model'} cannot run on local tensors: {error}"
            ) from error
        if found:
            raise ValueError(
                f"generate_static: static mode is Eager up to rounding only: {found[0]}"
            )
        return with_sizes


def _next(sizes: list[_Said], used: list[_Said], site: str) -> list[_Said]:
    """Lines not yet used of the module where it went wrong, or the next one above it."""
    parts = site.split(".") if site else []
    for count in range(len(parts), -1, -1):
        pattern = _numbered(".".join(parts[:count]))
        more = [one for one in sizes if _numbered(one.path) == pattern and one not in used]
        if more:
            return more
    return []


def _lines(model: nn.Module, lowered: Lowered, seen: Record) -> list[_Said]:
    """What a record says of each module."""
    said = [*_of_sites(lowered, seen)]
    pinned = {one.path for one in said if _pins(one)}
    params = dict(model.named_parameters())
    said += _of_leaves(seen, lowered, pinned, params)
    for name, placements in seen.params.items():
        path, _, own = name.rpartition(".")
        summed = tuple(one if one.is_partial() else Replicate() for one in placements)
        if any(one.is_partial() for one in placements):
            said.append(_Said("annotate", path, f"{own}.grad", summed))
    said += _of_operators(seen.calls)
    for name, placements in seen.results.items():
        if any(_cuts(one) for one in placements):
            said.append(_Said("annotate", "", f"<out:{name}>", placements))
    return said


def _of_sites(lowered: Lowered, seen: Record) -> Iterator[_Said]:
    for site in lowered.sites:
        if not site.moment.of_activations or (not site.path and site.moment is Moment.FORWARD_PRE):
            continue  # what the script gives is whole
        for step in site.moved:
            if step.act is Act.ANNOTATE:  # is found again
                continue
            passed = seen.sites.get((site.name, step.index))
            if passed is None:
                continue
            kind = "in" if site.moment is Moment.FORWARD_PRE else "out"
            yield _moved(site.path, f"<{kind}:{step.index}>", passed)


def _moved(path: str, tensor: str, passed: Passed) -> _Said:
    back = passed.back_before
    grad_src, grad_dst = [], []
    for axis, (src, dst) in enumerate(zip(passed.before, passed.after, strict=True)):
        came = back[axis] if back is not None else _backward(dst)
        grad_src.append(came)
        grad_dst.append(_backward(src))
    return _Said(
        "redistribute", path, tensor, passed.after, passed.before, tuple(grad_src), tuple(grad_dst)
    )


def _backward(forward: Placement) -> Placement:
    """How the gradient of what is placed so is to be placed: a sum is made where it arises."""
    return forward if isinstance(forward, Shard) else Replicate()


def _cuts(placement: Placement) -> bool:
    return not placement.is_replicate() and not placement.is_partial()


def _pins(one: _Said) -> bool:
    return one.grad_src is not None and any(source.is_partial() for source in one.grad_src)


def _of_leaves(
    seen: Record, lowered: Lowered, pinned: set[str], params: Mapping[str, Any]
) -> Iterator[_Said]:
    """Gradients that become sums in a module, and parameters that it takes as parts of one."""
    sites = {(site.path, site.moment) for site in lowered.sites}
    for (path, index), passed in seen.inputs.items():
        out = seen.outputs.get(path)
        above = any(f"{path}.".startswith(f"{one}.") for one in pinned)
        if passed.back_after is None or above or (path, Moment.FORWARD_PRE) in sites:
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
        has_bias = f"{path}.bias" in params
        if has_bias and any(one.is_partial() for one in passed.before):
            taken = tuple(one if one.is_partial() else Replicate() for one in passed.before)
            yield _Said("redistribute", path, "bias", taken, (Replicate(),) * len(taken))


def _of_operators(calls: Iterable[Call]) -> Iterator[_Said]:
    for call in calls:
        if call.sizes or call.name in ("view", "reshape", "split"):
            continue
        if any(_cuts(one) for one in call.given):
            yield _Said("annotate", call.path, f"<op:{call.name}:{call.number}>", call.given)


def _of_sizes(seen: Record) -> list[_Said]:
    """Of shapes that code says: where a dim is cut, the size is taken for that of the whole."""
    said = []
    for call in seen.calls:
        dims = [getattr(one, "dim", 0) for one in (call.result or call.given)]
        cut = tuple(Shard(dim) if dim in call.sizes and dim > 0 else Replicate() for dim in dims)
        if any(isinstance(one, Shard) for one in cut):
            said.append(_Said("annotate", call.path, f"<op:{call.name}:{call.number}>", cut))
    return said


def _written(plan: Plan, said: Iterable[_Said], model: nn.Module) -> Plan:
    """What a plan says of parameters and of the script's inputs, and lines; alike layers in one."""
    new = Plan(plan.mesh, cover=plan.cover)
    new._entries = [one for one in plan.entries if _stays(one)]
    names = [name for name, _ in model.named_modules()]
    groups: dict[tuple[str, str, str], list[_Said]] = {}
    for one in dict.fromkeys(said):
        groups.setdefault((one.verb, _numbered(one.path), one.tensor), []).append(one)
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
    of_script = kind is Kind.INPUT and not entry.path.pattern
    return kind in (Kind.STATE, Kind.MODULE) or of_script or entry.verb is Verb.INDEX


def _numbered(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", r"\\d+", re.escape(path).replace(r"\.", ".")).replace(
        ".", r"\."
    )


def _write(plan: Plan, one: _Said, pattern: str) -> None:
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
