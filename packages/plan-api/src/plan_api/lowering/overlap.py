"""Finds where communication of a plan can overlap with the products beside it: a pass over the IR.

Note: asynchronous tensor parallelism (Wang et al., ASPLOS 2023, doi:10.1145/3567955.3567959) splits
a product along the rows of its input. A site that gathers a sequence in front of Linears that are
sharded on their output features receives one rank's rows while it multiplies another's. A site
that reduces behind a Linear that is sharded on its input features sends some rows of the output
while it computes others. This module only finds such sites; `plan_api.ops.overlap` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import AxisMove, HookPoint, Lowered, OpKind, Site, SiteStep
from plan_api.lowering.model_names import is_inside
from plan_api.spec.axes import axis_names

__all__ = ["Overlap", "check_overlaps", "find_overlaps"]


@dataclass(frozen=True)
class Overlap:
    """A site that communicates beside products, and the Linears that compute them.

    Attributes:
        path: of the site's module.
        hook_point: on its inputs or on its outputs.
        step: that communicates.
        axis: the name of the mesh axis.
        linears: the paths of the Linears; empty if nothing is overlapped.
        reason: why nothing is; empty if something is.
    """

    path: str
    hook_point: HookPoint
    step: SiteStep
    axis: str
    linears: tuple[str, ...]
    reason: str = ""

    @property
    def is_input(self) -> bool:
        """Whether it communicates in front of the Linears, and not behind one."""
        return self.hook_point is HookPoint.FORWARD_PRE

    @property
    def move(self) -> AxisMove:
        """The placements along the axis."""
        return self.step.moves[self.axis]

    @property
    def forward(self) -> str:
        """The collective of forward that is overlapped; "" if forward communicates nothing."""
        if self.is_input:
            return "all-gather" if isinstance(self.move.src, Shard) else ""
        return "reduce-scatter" if isinstance(self.move.dst, Shard) else "all-reduce"

    @property
    def backward(self) -> str:
        """The collective of backward that is overlapped; "" if backward communicates nothing."""
        if self.is_input:
            return "reduce-scatter" if isinstance(self.move.src, Shard) else "all-reduce"
        return "all-gather" if isinstance(self.move.dst, Shard) else ""


def find_overlaps(
    lowered: Lowered, model: nn.Module, mesh: DeviceMesh, axis: str
) -> tuple[Overlap, ...]:
    """Finds the sites that gather or reduce along an axis around products, in the plan's order.

    Args:
        lowered: a plan, lowered for the model.
        model: any; it is not changed.
        mesh: of the plan.
        axis: the name of one of its axes.

    Returns:
        what can be overlapped, and what cannot, with the reason.
    """
    return tuple(
        _overlap(site, step, lowered, model, mesh, axis)
        for site in lowered.sites
        if site.hook_point.is_module_hook
        for step in site.steps
        if step.kind is OpKind.REDIST
        and axis in step.moves
        and _communicates(site.hook_point, step.moves[axis])
    )


def check_overlaps(
    overlaps: tuple[Overlap, ...], lowered: Lowered, mesh: DeviceMesh, axis: str
) -> None:
    """Checks that an axis can be overlapped, and that something is.

    Args:
        overlaps: of `find_overlaps`.
        lowered: the plan, lowered.
        mesh: of the plan.
        axis: the name of the axis.

    Raises:
        ValueError: the mesh has no such axis, or one of a single rank; a module is compiled; or
            nothing is overlapped.
    """
    axes = axis_names(mesh)
    if axis not in axes:
        raise ValueError(
            f"overlap={axis!r}: expected an axis of the plan's mesh, one of {', '.join(axes)}"
        )
    if mesh.size(axes.index(axis)) == 1:
        raise ValueError(
            f"overlap={axis!r}: expected an axis of several ranks, got one rank, which sends "
            f"nothing; leave it out"
        )
    if lowered.compiled:
        policy = next(iter(lowered.compiled.values()))
        raise ValueError(
            f"overlap={axis!r}: expected modules that are not compiled, as a graph has no sends "
            f"and receives, got {policy.description}; leave out one of the two"
        )
    if not any(one.linears for one in overlaps):
        reasons = "\n".join(
            dict.fromkeys(f"{one.step.description}: {one.reason}" for one in overlaps)
        )
        raise ValueError(
            f"overlap={axis!r}: expected a site that gathers or reduces along this axis beside a "
            f"Linear, and the plan has none; leave it out\n{reasons}".rstrip()
        )


def _communicates(hook_point: HookPoint, move: AxisMove) -> bool:
    """Whether a step gathers its input, reduces its input's gradient, or reduces its output."""
    if hook_point is HookPoint.FORWARD:
        return _is_sum(move.src) and type(move.dst) in (Shard, Replicate)
    if type(move.dst) is not Replicate:
        return False
    return type(move.src) is Shard or (move.src == Replicate() and _is_sum(move.grad_src))


def _is_sum(placement: Placement | None) -> bool:
    return type(placement) is Partial and placement.reduce_op == "sum"


def _overlap(
    site: Site, step: SiteStep, lowered: Lowered, model: nn.Module, mesh: DeviceMesh, axis: str
) -> Overlap:
    reason = _reason_of_site(site, step, lowered, axis)
    linears: tuple[str, ...] = ()
    if not reason:
        candidates = dict(_candidates(site, lowered, model, mesh, axis))
        linears = tuple(name for name, reason in candidates.items() if not reason)
        reason = _reason_of_linears(site, candidates, axis)
    return Overlap(site.path, site.hook_point, step, axis, () if reason else linears, reason)


def _reason_of_site(site: Site, step: SiteStep, lowered: Lowered, axis: str) -> str:
    others = [
        name
        for name, move in step.moves.items()
        if name != axis and (move.src != move.dst or move.grad_src is not None)
    ]
    if others:
        return f"it redistributes along {', '.join(others)} as well"
    if any(other is not step and other.index == step.index for other in site.moved):
        return "another entry redistributes the tensor too"
    move = step.moves[axis]
    if not _has_usual_gradient(site.hook_point, move):
        return "its gradient has other placements than those of the products"
    if lowered.runs_on_dtensors(site.path):
        return "Plan.eager runs the module on DTensors"
    if any(is_inside(path, site.path) for path in lowered.recomputed):
        return "it is recomputed without its hooks; recompute the module around it"
    regions = [
        one.path for one in lowered.sites for other in one.steps if other.kind is OpKind.LOCAL
    ]
    if any(is_inside(site.path, path) or path == site.path for path in regions):
        return "Plan.local runs the module on local tensors"
    return ""


def _has_usual_gradient(hook_point: HookPoint, move: AxisMove) -> bool:
    """Whether backward does the transpose of what forward does."""
    if hook_point is HookPoint.FORWARD:
        of_output = move.dst if type(move.dst) is Shard else Replicate()
        return move.grad_src in (None, of_output) and move.grad_dst in (None, Replicate())
    return _is_sum(move.grad_src) and move.grad_dst in (None, move.src)


def _candidates(
    site: Site, lowered: Lowered, model: nn.Module, mesh: DeviceMesh, axis: str
) -> Iterator[tuple[str, str]]:
    """Yields the Linears inside a site's module that are sharded along the axis, with a reason."""
    at, dim = axis_names(mesh).index(axis), 0 if site.hook_point is HookPoint.FORWARD_PRE else 1
    inner = [
        other.path
        for other in lowered.sites
        if other.hook_point is site.hook_point
        and other.path != site.path
        and is_inside(other.path, site.path)
        and any(axis in step.moves for step in other.moved)
    ]
    for name, module in model.named_modules():
        schedule = lowered.schedules.get(f"{name}.weight")
        if not is_inside(name, site.path) or not isinstance(module, nn.Linear) or schedule is None:
            continue
        placement = schedule.run[at]
        if type(placement) is not Shard or placement.dim != dim:
            continue
        if not any(is_inside(name, path) for path in inner):
            yield name, _reason_of_linear(site, name, module, lowered, at)


def _reason_of_linear(site: Site, name: str, module: nn.Linear, lowered: Lowered, axis: int) -> str:
    schedules = [
        lowered.schedules[tensor]
        for tensor in (f"{name}.weight", f"{name}.bias")
        if tensor in lowered.schedules
    ]
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        return f"{name} has a forward of its own"
    if name in lowered.precisions:
        return f"{name} computes in low precision"
    if any(
        not placement.is_replicate()
        for schedule in schedules
        for other, placement in enumerate(schedule.run)
        if other != axis
    ):
        return f"{name} is sharded along another axis too"
    if any(schedule.has_phases for schedule in schedules):
        return f"{name}.weight is gathered while {name} runs"
    if site.hook_point is HookPoint.FORWARD_PRE:
        if any(one.path == name and one.hook_point is HookPoint.RUN for one in lowered.sites):
            return f"a parameter of {name} is redistributed while {name} runs"
        if any(
            path != site.path and is_inside(path, site.path) and is_inside(name, path)
            for path in lowered.fully_sharded
        ):
            return f"fully_shard gathers the parameters of {name} after the input"
    return ""


def _reason_of_linears(site: Site, candidates: dict[str, str], axis: str) -> str:
    possible = [name for name, reason in candidates.items() if not reason]
    if not candidates:
        features = "output" if site.hook_point is HookPoint.FORWARD_PRE else "input"
        return f"no Linear here is sharded on its {features} features along {axis!r}"
    if not possible:
        return next(iter(candidates.values()))
    if site.hook_point is HookPoint.FORWARD and len(candidates) > 1:
        return f"several Linears here have parts of sums: {', '.join(candidates)}"
    return ""
