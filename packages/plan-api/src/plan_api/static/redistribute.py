"""Redistributes local tensors at a site: forward as the plan says, and their gradients back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from plan_api.context_parallel.local_sequence import sequence_transform, without_sharded_positions
from plan_api.lowering.ir import AxisMove, HookPoint, OpKind, Site, SiteStep
from plan_api.ops.function_calls import TorchFunction
from plan_api.ops.low_precision.tokens import TokenGather
from plan_api.runtime import attribution
from plan_api.runtime.attribution import moving
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.hooks import TensorTransform
from plan_api.runtime.local_redistribute import LocalRedistribution, local_redistribution
from plan_api.runtime.local_shards import ShardSizes
from plan_api.spec.axes import axis_names
from plan_api.spec.placements import format_placement
from plan_api.static.coverage import CallCoverage

__all__ = ["AxisPlacements", "SiteTypes", "StaticRedistribution", "static_transform"]


class _AxisChange(NamedTuple):
    """A redistribution along one axis of the mesh, by number."""

    axis: int
    src: Placement
    dst: Placement


class _Change(NamedTuple):
    """An axis change, and the function that makes it."""

    axis: int
    src: Placement
    dst: Placement
    redistribute: LocalRedistribution


class AxisPlacements(NamedTuple):
    """The placements of a tensor and of its gradient around a redistribution, along one axis.

    Attributes:
        src: of the tensor before.
        dst: of the tensor afterwards.
        grad_src: of the gradient that backward brings to `dst`; None if the plan leaves it open.
        grad_dst: of the gradient that it returns for `src`.
    """

    src: Placement
    dst: Placement
    grad_src: Placement | None
    grad_dst: Placement | None


class SiteTypes(Protocol):
    """What checks types where a plan places tensors; see `plan_api.inspect.typecheck.types`."""

    def redistributed(
        self, site: Site, step: SiteStep, transform: StaticRedistribution
    ) -> TensorTransform:
        """Returns a transform that checks a tensor, redistributes it and types the result."""

    def annotated(self, site: Site, step: SiteStep) -> TensorTransform:
        """Returns a transform that checks a tensor and returns it."""

    def operator(self, site: Site, step: SiteStep, function: TorchFunction) -> TorchFunction:
        """Returns what replaces an operator, with the type of its result."""


def static_transform(
    site: Site,
    step: SiteStep,
    mesh: DeviceMesh,
    call_coverage: CallCoverage | None = None,
    types: SiteTypes | None = None,
    sizes: ShardSizes | None = None,
) -> TensorTransform | None:
    """Returns what a hook does with the local tensors of a step; None if nothing.

    Args:
        site: a site on the inputs or outputs of a module.
        step: one of its steps.
        mesh: the plan's mesh.
        call_coverage: see `StaticRedistribution`.
        types: checks the types of the tensors; None: they are not checked.
        sizes: see `StaticRedistribution`.

    Raises:
        ValueError: the step does not say the current placement of a tensor, or of its gradient.
    """
    at_root = not site.path
    if step.kind is OpKind.ORDER:
        return sequence_transform(site, step, mesh)
    if step.kind is OpKind.ANNOTATE:
        if types is not None:
            return types.annotated(site, step)
        # Only the model's own output is annotated at run time.
        return (
            _OutputAsDTensor(site, step, mesh, sizes)
            if at_root and site.hook_point is HookPoint.FORWARD
            else None
        )
    is_input = at_root and site.hook_point is HookPoint.FORWARD_PRE
    step = without_sharded_positions(site, step)
    transform = StaticRedistribution(step, mesh, site.name, is_input, call_coverage, sizes)
    if types is not None:
        return types.redistributed(site, step, transform)
    return None if transform.is_identity else transform


class StaticRedistribution:
    """Redistributes each local tensor that it is called with, as one step of the plan says.

    Args:
        step: a step whose moves say the current placements of tensors.
        mesh: the plan's mesh.
        site: the site, for messages.
        is_input: whether tensors without a current placement in the plan are replicated, as are
            those with which the script calls the model.
        call_coverage: records each tensor that is redistributed; None: not recorded.
        sizes: knows the global sizes of uneven shards, of the whole model; None: of this step only.

    Attributes:
        placements: by axis, those before and after.
        moves_tensor: whether it changes tensors.
        moves_gradient: whether it changes their gradients.
        gather: gathers them in float8; None: nothing is.

    Raises:
        ValueError: the step does not say the current placement of a tensor, or of its gradient.
    """

    settled: DTensorSpec | None = None  # part of the protocol of hooks; here nothing is a DTensor
    gather: TokenGather | None = None

    def __init__(
        self,
        step: SiteStep,
        mesh: DeviceMesh,
        site: str,
        is_input: bool = False,
        call_coverage: CallCoverage | None = None,
        sizes: ShardSizes | None = None,
    ) -> None:
        self._call_coverage = call_coverage
        self._sizes = sizes or ShardSizes(mesh)
        self.what = f"{site}:{step.tensor}:{step.index}"
        self._step = step
        self.backward_context = StepContext(f"the backward of {site}", step)
        axes = axis_names(mesh)
        forward: list[_AxisChange] = []
        backward: list[_AxisChange] = []
        self.placements: dict[str, AxisPlacements] = {}
        averaged = 1
        for name, move in step.moves.items():
            axis = axes.index(name)
            src = self._current_placement(name, move, is_input)
            forward.append(_AxisChange(axis, src, move.dst))
            gradient = self._gradient_placements(name, move, src)
            backward.append(_AxisChange(axis, *gradient))
            is_open = src == move.dst and move.grad_src is None and move.grad_dst is None
            self.placements[name] = AxisPlacements(
                src, move.dst, *((None, None) if is_open else gradient)
            )
            if isinstance(src, Partial) and src.reduce_op == "avg" and src != move.dst:
                averaged *= mesh.size(axis)
        self._before = tuple(one.src for one in forward)
        self._after = tuple(one.dst for one in forward)
        self._forward = _in_order(forward, mesh, self.what)
        self._backward = _in_order(backward, mesh, f"the gradient of {self.what}")
        self._averaged = averaged
        self.moves_tensor = bool(self._forward)
        self.moves_gradient = bool(self._backward) or averaged != 1

    @property
    def is_identity(self) -> bool:
        """Whether it changes neither tensors nor gradients."""
        return not self.moves_tensor and not self.moves_gradient

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the redistributed local tensor.

        Raises:
            ValueError: the tensor is a DTensor, or its shards are not those of `torch.chunk`.
        """
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{self.what}: expected a local tensor, as in static mode modules run on these, "
                f"got a DTensor, {tensor._spec}; pass its to_local(), placed as the plan says, or "
                f"use mode='eager'"
            )
        self.record()
        if tensor.requires_grad and torch.is_grad_enabled():
            return _RedistributeLocal.apply(tensor, self)  # type: ignore[no-any-return, no-untyped-call]
        return self.forward(tensor)[0] if self.moves_tensor else tensor

    def record(self) -> None:
        """Records that a tensor is redistributed, here or by what replaces this."""
        if self._call_coverage is not None:
            self._call_coverage.add(self.what)

    def forward(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Mapping[int, int | None]]:
        """Redistributes a tensor, without autograd.

        Returns:
            the tensor, and by axis the global sizes of dims that have been sharded unevenly.
        """
        if attribution.observer is None:
            return self._move(tensor)
        with moving(self._step, self._before, self._after):
            return self._move(tensor)

    def _move(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Mapping[int, int | None]]:
        sharded: dict[int, int | None] = {}
        for axis, src, dst, redistribute in self._forward:
            length = None
            if type(src) is Shard:
                length = self._sizes.length(self.what, axis, src.dim, tensor)
                if self.gather is not None and length is None and self.gather.takes(tensor):
                    tensor = self.gather(tensor)
                    continue
            if type(dst) is Shard:
                sharded[axis] = self._sizes.shard(axis, dst.dim, tensor.shape[dst.dim])
            tensor = redistribute(tensor, length)
        return tensor, sharded

    def backward(self, grad: torch.Tensor, lengths: Mapping[int, int | None]) -> torch.Tensor:
        """Redistributes the gradient of an output to that of the input.

        Args:
            grad: of the output.
            lengths: those that `forward` returned: a gradient is sharded as its tensor.
        """
        if attribution.observer is None:
            return self._move_back(grad, lengths)
        with moving(self._step, self._after, self._before):
            return self._move_back(grad, lengths)

    def _move_back(self, grad: torch.Tensor, lengths: Mapping[int, int | None]) -> torch.Tensor:
        for axis, src, _, redistribute in self._backward:
            length = lengths.get(axis) if type(src) is Shard else None
            grad = redistribute(grad, length)
        return grad if self._averaged == 1 else grad / self._averaged

    def _waits_for_(self) -> str:
        """Describes the collective to `fused_comm.diagnosis`."""
        return f"plan-api: {self.what}, {self._step.description}"

    def _current_placement(self, axis: str, move: AxisMove, is_input: bool) -> Placement:
        if move.src is not None:
            return move.src
        if is_input:
            return Replicate()
        raise ValueError(
            f"{self.what}: expected its current placement along {axis!r}, which static mode needs "
            f"to redistribute it to {format_placement(move.dst)}; add "
            f"redistribute(path, src, dst), or make the plan with generate_static()"
        )

    def _gradient_placements(
        self, axis: str, move: AxisMove, src: Placement
    ) -> tuple[Placement, Placement]:
        """Returns the placements of the gradient along an axis, before and after."""
        if move.grad_src is None and move.grad_dst is None and src == move.dst:
            return Replicate(), Replicate()
        found = move.grad_src
        if found is None and type(move.dst) is Shard:
            found = move.dst
        if found is None and (not isinstance(src, Shard) or isinstance(move.dst, Partial)):
            found = Replicate()
        if found is None or (move.grad_dst is not None and move.grad_src is None):
            raise ValueError(
                f"{self.what}, {format_placement(src)} to {format_placement(move.dst)} along "
                f"{axis!r}: expected the current placement of its gradient; add "
                f"grad_src=Partial() if ranks compute different parts of what follows, "
                f"grad_src=Replicate() if all compute the same"
            )
        if move.grad_dst is not None:
            return found, move.grad_dst
        return found, src if type(src) is Shard else Replicate()


class _OutputAsDTensor:
    """Makes an annotated output of the model the DTensor that Eager returns."""

    settled: DTensorSpec | None = None

    def __init__(
        self, site: Site, step: SiteStep, mesh: DeviceMesh, sizes: ShardSizes | None
    ) -> None:
        self._mesh, self._sizes = mesh, sizes or ShardSizes(mesh)
        self._what = f"{site.name}:{step.tensor}:{step.index}"
        self._placements: list[Placement] = [
            step.moves[axis].dst if axis in step.moves else Replicate() for axis in axis_names(mesh)
        ]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._sizes.as_dtensor(self._what, tensor, self._placements)


class _RedistributeLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, transform: StaticRedistribution) -> torch.Tensor:
        ctx.transform, ctx.lengths = transform, {}
        if not transform.moves_tensor:
            return tensor.view_as(tensor)  # an autograd function may not return its input
        after, ctx.lengths = transform.forward(tensor)
        return after

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        transform: StaticRedistribution = ctx.transform
        if not transform.moves_gradient:
            return grads[0], None
        try:
            return transform.backward(grads[0], ctx.lengths), None
        except Exception as error:
            transform.backward_context.add_to(error, grads)
            raise


def _in_order(changes: Iterable[_AxisChange], mesh: DeviceMesh, what: str) -> list[_Change]:
    """Orders changes as DTensor does: gathers and reductions first, then shards.

    A dim that several axes shard is sharded by the outermost axis first, and so gathered by the
    innermost axis first. Along an axis of one rank nothing changes.
    """
    by_axis = sorted((one for one in changes if mesh.size(one.axis) > 1), key=lambda one: one.axis)
    split: list[_AxisChange] = []
    for one in by_axis:
        if _must_gather_first(one, by_axis):
            split += [
                _AxisChange(one.axis, one.src, Replicate()),
                _AxisChange(one.axis, Replicate(), one.dst),
            ]
        elif one.src != one.dst:
            split.append(one)
    gathers = [one for one in split if one.src != Replicate()]
    if any(isinstance(one.src, Shard) for one in by_axis):
        gathers.reverse()
    return [
        _Change(*one, local_redistribution(one.src, one.dst, mesh, one.axis, what))
        for one in [*gathers, *(one for one in split if one.src == Replicate())]
    ]


def _must_gather_first(change: _AxisChange, changes: Iterable[_AxisChange]) -> bool:
    """Whether a shard has to be gathered, as another axis starts or stops sharding its dims."""
    if not (isinstance(change.src, Shard) and isinstance(change.dst, Shard)):
        return False
    return any(
        placement in (change.src, change.dst)
        and other.src != other.dst
        and (other.axis < change.axis or change.src != change.dst)
        for other in changes
        for placement in (other.src, other.dst)
        if other.axis != change.axis
    )
