"""The patch point of every redistribution, `redistribute_local_tensor`.

In general, axes with placements of this package become Replicate, torch redistributes the other
axes, and then this package's target placements are applied, axis by axis. Two cases are shorter:
several axes that become Replicate are gathered at once (`multi_axis_gather`), and if only one axis
changes besides axes that change from Partial to Replicate, the other axes are not gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_shard import _compat
from ragged_shard.fallback import record_fallback
from ragged_shard.geometry.boxes import contiguous_strides
from ragged_shard.geometry.specs import (
    Placements,
    any_custom,
    base_shape,
    dim_of,
    is_custom,
    ragged_axis,
    replace_axis,
    tensor_meta_of,
    with_placements,
)
from ragged_shard.geometry.validation import check_local, check_placements
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard
from ragged_shard.redistribution.multi_axis_gather import GatherOverAxes, plan_gather
from ragged_shard.redistribution.one_axis import redistribute_axis
from ragged_shard.redistribution.reduction_input import ReductionInput

Native = Callable[..., torch.Tensor]


def redistribute_local_tensor(
    native: Native,
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    **options: object,
) -> torch.Tensor:
    """Redistributes a local tensor, in place of torch's function of this name.

    Args:
        native: torch's function.
        local_tensor: of the current spec's local shape.
        current_spec: of the tensor.
        target_spec: of the result; of the same mesh and shape.
        async_op: whether the result may be an AsyncCollectiveTensor, which waits at its first use.
        options: of torch's function, passed to it.

    Raises:
        ValueError: the target does not fit the tensor or the mesh, or the local tensor has not the
            current spec's local shape; nothing is sent.
        NotImplementedError: the specs have different meshes.
    """
    if not (any_custom(current_spec.placements) or any_custom(target_spec.placements)):
        return native(local_tensor, current_spec, target_spec, async_op=async_op, **options)
    if current_spec.mesh != target_spec.mesh:
        raise NotImplementedError(
            f"redistribute: expected a target on the same mesh, {current_spec.mesh}, got "
            f"{target_spec.mesh}; call full_tensor(), and distribute its result on the other mesh"
        )
    mesh = current_spec.mesh
    record_fallback(target_spec, current_spec)
    if mesh.get_coordinate() is None:  # as in torch: the rank has no elements
        return local_tensor
    reduction = _reduction_axis(target_spec)
    target: Placements = tuple(target_spec.placements)
    if reduction is not None:
        target = replace_axis(target, reduction.axis, reduction.placement.ragged)
    if not _compat.is_tracing():
        check_local("redistribute", local_tensor, current_spec)
    shape = tensor_meta_of(current_spec).shape
    target = _canonical(target, shape)
    check_placements(shape, mesh, target)
    result = _Redistribution(current_spec, target, native).run(local_tensor)
    if isinstance(result, AsyncCollectiveTensor) and not (async_op and reduction is None):
        result = result.wait()
    if reduction is not None:
        return reduction.placement.prepare(result, mesh.get_local_rank(reduction.axis))
    return result


@dataclass(frozen=True)
class _ReductionAxis:
    axis: int
    placement: ReductionInput


def _reduction_axis(spec: DTensorSpec) -> _ReductionAxis | None:
    """Returns the axis whose target is a `ReductionInput`, or None."""
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, ReductionInput):
            return _ReductionAxis(axis, placement)
    return None


def _canonical(placements: Placements, shape: Sequence[int]) -> Placements:
    """Returns the placements with equivalent ones replaced by one form.

    If no other axis shards the dim, a `_StridedShard`, which is torch's placement of a sharded dim
    that was flattened after another, becomes an InterleavedShard. If another axis does, as after a
    view of batch and heads (dispatch/rules/interleaved_views.py), an InterleavedShard becomes a
    `_StridedShard`, which defines the order of the axes. An InterleavedShard of one chunk, and of
    units of 1, becomes a Shard.
    """
    for axis, placement in enumerate(placements):
        if not isinstance(placement, InterleavedShard | _StridedShard):
            continue
        dim, others = placement.dim, replace_axis(placements, axis, Replicate())
        is_only_shard = all(dim_of(other) != dim for other in others)
        if isinstance(placement, _StridedShard):
            factor = int(placement.split_factor)
            if is_only_shard and shape[dim] % factor == 0:
                placements = replace_axis(placements, axis, InterleavedShard(dim, factor))
        elif placement.equals_shard:
            placements = replace_axis(placements, axis, Shard(dim))
        elif any(dim_of(other) == dim for other in placements[:axis]) and placement.unit == 1:
            strided = _StridedShard(dim, split_factor=placement.interleaves)
            placements = replace_axis(placements, axis, strided)
    return placements


@dataclass
class _Redistribution:
    """A redistribution in progress.

    Attributes:
        spec: of the tensor before it.
        target: the target placements.
        native: torch's function.
        at: the current placements, which change as axes are redistributed.
    """

    spec: DTensorSpec
    target: Placements
    native: Native

    def __post_init__(self) -> None:
        self.mesh = self.spec.mesh
        self.meta = tensor_meta_of(self.spec)
        self.at: Placements = _canonical(tuple(self.spec.placements), self.meta.shape)

    def run(self, local: torch.Tensor) -> torch.Tensor:
        self._refuse_new_sums()
        sums = [
            axis
            for axis, (now, then) in enumerate(zip(self.at, self.target, strict=True))
            if isinstance(now, Partial) and isinstance(then, Replicate)
        ]
        others = [axis for axis in self._differing() if axis not in sums]
        if not others:
            return self._reduce(local, sums)
        gather = self._gather_of(others)
        if gather is not None:
            local = gather.apply(self._reduce(local, sums), self.mesh)
            self.at = self.target
            return local
        if len(others) == 1 and self._is_direct(others[0]):
            [axis] = others
            if isinstance(self.at[axis], RaggedShard):  # the fewest elements are summed
                return self._change(self._reduce(local, sums), axis)
            return self._reduce(self._change(local, axis), sums)
        return self._through_native(local)

    def _differing(self) -> list[int]:
        return [axis for axis, now in enumerate(self.at) if now != self.target[axis]]

    def _gather_of(self, axes: list[int]) -> GatherOverAxes | None:
        """Returns one gather over all these axes if that redistributes them; else None."""
        shards = [self.at[axis] for axis in axes]
        gathered = all(isinstance(self.target[axis], Replicate) for axis in axes)
        if not gathered or not any_custom(shards) or any(p.is_partial() for p in shards):
            return None
        return plan_gather(self.meta.shape, self.mesh, self.at, axes)

    def _is_direct(self, axis: int) -> bool:
        """Whether the axis can be redistributed without the others."""
        now, then = self.at[axis], self.target[axis]
        if not (is_custom(now) or is_custom(then)):
            return False
        others = [p for other, p in enumerate(self.at) if other != axis]
        if any(isinstance(p, RaggedShard) for p in others):
            return False  # it is applied after this axis, and must be gathered first
        if isinstance(now, RaggedShard) and isinstance(then, RaggedShard):
            return True
        # A dim on two axes is sharded in the order of the axes; an all-to-all is over one axis.
        if any(isinstance(p, _StridedShard) for p in (now, then)):
            return False
        sharded = {dim for p in (now, then) if (dim := dim_of(p)) is not None}
        return not any(dim_of(p) in sharded for p in others)

    def _change(self, local: torch.Tensor, axis: int) -> torch.Tensor:
        base = base_shape(self.meta.shape, self.mesh, self.at, axis)
        changed = redistribute_axis(local, self.at[axis], self.target[axis], base, self.mesh, axis)
        self.at = replace_axis(self.at, axis, self.target[axis])
        return changed

    def _reduce(self, local: torch.Tensor, axes: list[int]) -> torch.Tensor:
        """Reduces Partial over axes, elementwise and independently of the other placements."""
        if not axes:
            return local
        start = tuple(p if a in axes else Replicate() for a, p in enumerate(self.at))
        end = tuple(Replicate() for _ in self.at)
        for axis in axes:
            self.at = replace_axis(self.at, axis, Replicate())
        return self._native(local, start, end, tuple(local.shape))

    def _through_native(self, local: torch.Tensor) -> torch.Tensor:
        differing, final = self._differing(), self.target
        ragged = ragged_axis(self.at)
        gathered = [a for a in differing if isinstance(self.at[a], InterleavedShard)]
        if ragged is not None:
            gathered.insert(0, ragged)
        for axis in gathered:
            self.target = replace_axis(self.at, axis, Replicate())
            local = self._change(local, axis)
        sharded = [a for a in self._differing_from(final) if is_custom(final[a])]
        sharded.sort(key=lambda axis: isinstance(final[axis], RaggedShard))  # ragged is last
        native_target = final
        for axis in sharded:  # Partial remains, so that a reduce-scatter can reduce it
            now = self.at[axis]
            placement = now if isinstance(now, Partial) else Replicate()
            native_target = replace_axis(native_target, axis, placement)
        local = self._native_around_interleaved(local, native_target)
        for axis in sharded:
            self.target = replace_axis(self.at, axis, final[axis])
            local = self._change(local, axis)
        return local

    def _differing_from(self, final: Placements) -> list[int]:
        return [axis for axis, now in enumerate(self.at) if now != final[axis]]

    def _native_around_interleaved(self, local: torch.Tensor, target: Placements) -> torch.Tensor:
        """Lets torch redistribute the local shape without interleaved axes, which do not change."""
        interleaved = [axis for axis, now in enumerate(self.at) if is_custom(now)]
        start, end, shape = self.at, target, tuple(self.meta.shape)
        for axis in interleaved:
            placement = start[axis]
            assert isinstance(placement, InterleavedShard)
            assert placement == end[axis]
            size, rank = self.mesh.size(axis), self.mesh.get_local_rank(axis)
            shape = placement.local_shape(shape, size, rank)
            start, end = (
                replace_axis(start, axis, Replicate()),
                replace_axis(end, axis, Replicate()),
            )
        self.at = target
        return self._native(local, start, end, shape)

    def _native(
        self, local: torch.Tensor, start: Placements, end: Placements, shape: tuple[int, ...]
    ) -> torch.Tensor:
        if start == end:
            return local
        meta = TensorMeta(torch.Size(shape), contiguous_strides(shape), local.dtype)
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        return self.native(
            local,
            with_placements(self.spec, start, meta),
            with_placements(self.spec, end, meta),
        )

    def _refuse_new_sums(self) -> None:
        for axis in self._differing():
            now, then = self.at[axis], self.target[axis]
            if isinstance(then, Partial) and is_custom(now):
                raise ValueError(
                    f"redistribute: expected a target that is not Partial for axis {axis}, which "
                    f"is {now!r}, got {then}; only operators make Partial tensors"
                )


def redistribute_backward(
    native: Callable[..., object], ctx: Any, grad_output: torch.Tensor | None
) -> object:
    """Replaces `Redistribute.backward` of torch/distributed/tensor/_redistribute.py.

    The gradient of a Partial is Replicate: torch redistributes it if it is a Shard, and this
    function if it has a placement of this package.
    """
    if grad_output is not None:
        grads: Placements = grad_output._spec.placements  # type: ignore[attr-defined]
        before: DTensorSpec = ctx.current_spec
        if any_custom(grads) and any(isinstance(p, Partial) for p in before.placements):
            placements = tuple(
                Replicate() if isinstance(then, Partial) and is_custom(now) else then
                for now, then in zip(grads, before.placements, strict=True)
            )
            ctx.current_spec = with_placements(before, placements)
    return native(ctx, grad_output)
