"""The patch point of every redistribution, `redistribute_local_tensor`.

It proceeds axis by axis. Torch redistributes its own placements, on the tensor without the axes of
this package, which become Replicate before and are sharded again after.
Two cases are shorter: several axes that become
replicas are gathered at once (`multi_axis_gather`), and if only one axis changes, and besides it
sums become replicas, nothing is taken off.
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
        native: torch's own function.
        local_tensor: of the current spec's local shape.
        current_spec: what the tensor is.
        target_spec: what it shall be; of the same mesh and shape.
        async_op: the result may be an AsyncCollectiveTensor, which waits at its first use.
        options: of torch's, handed on.

    Raises:
        ValueError: the target does not fit the tensor or the mesh, or the local tensor is not of
            the current spec's local shape; nothing was sent.
        NotImplementedError: another mesh.
    """
    if not (any_custom(current_spec.placements) or any_custom(target_spec.placements)):
        return native(local_tensor, current_spec, target_spec, async_op=async_op, **options)
    if current_spec.mesh != target_spec.mesh:
        raise NotImplementedError(
            f"redistribute: from mesh {current_spec.mesh} to another, {target_spec.mesh}; a tensor "
            f"moves between placements of one mesh only"
        )
    mesh = current_spec.mesh
    record_fallback(target_spec, current_spec)
    if mesh.get_coordinate() is None:  # as in torch: such a rank holds nothing
        return local_tensor
    reduction = _reduction_axis(target_spec)
    target: Placements = tuple(target_spec.placements)
    if reduction is not None:
        target = replace_axis(target, reduction.axis, reduction.placement.ragged)
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
    """The axis that is made ready for a reduction (filled.py), or None."""
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, ReductionInput):
            return _ReductionAxis(axis, placement)
    return None


def _canonical(placements: Placements, shape: Sequence[int]) -> Placements:
    """The placements with one name for what is the same.

    A `_StridedShard` is an InterleavedShard where no other axis cuts the dim: what torch makes of a
    sharded dim that is flattened behind another. Where another axis does, as a view of batch and
    heads leaves it (ops/interleaved_views.py), both are called `_StridedShard`, which says in which
    order they cut. An InterleavedShard of one chunk is a Shard.
    """
    for axis, placement in enumerate(placements):
        if not isinstance(placement, InterleavedShard | _StridedShard):
            continue
        dim, others = placement.dim, replace_axis(placements, axis, Replicate())
        alone = all(dim_of(other) != dim for other in others)
        if isinstance(placement, _StridedShard):
            factor = int(placement.split_factor)
            if alone and shape[dim] % factor == 0:
                placements = replace_axis(placements, axis, InterleavedShard(dim, factor))
        elif placement.interleaves == 1:
            placements = replace_axis(placements, axis, Shard(dim))
        elif not alone and any(dim_of(other) == dim for other in placements[:axis]):
            strided = _StridedShard(dim, split_factor=placement.interleaves)
            placements = replace_axis(placements, axis, strided)
    return placements


@dataclass
class _Redistribution:
    """One redistribution in progress: its current and its target placements."""

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
        """One gather over all these axes, where that is what they need."""
        shards = [self.at[axis] for axis in axes]
        gathered = all(isinstance(self.target[axis], Replicate) for axis in axes)
        if not gathered or not any_custom(shards) or any(p.is_partial() for p in shards):
            return None
        return plan_gather(self.meta.shape, self.mesh, self.at, axes)

    def _is_direct(self, axis: int) -> bool:
        """Whether the axis can change while the others stay."""
        now, then = self.at[axis], self.target[axis]
        if not (is_custom(now) or is_custom(then)):
            return False
        others = [p for other, p in enumerate(self.at) if other != axis]
        if any(isinstance(p, RaggedShard) for p in others):
            return False  # it applies after this axis, and must be gathered first
        if isinstance(now, RaggedShard) and isinstance(then, RaggedShard):
            return True
        # A dim cut by two axes is cut in the order of the axes; exchanges know one axis only.
        if any(isinstance(p, _StridedShard) for p in (now, then)):
            return False
        cut = {dim for p in (now, then) if (dim := dim_of(p)) is not None}
        return not any(dim_of(p) in cut for p in others)

    def _change(self, local: torch.Tensor, axis: int) -> torch.Tensor:
        base = base_shape(self.meta.shape, self.mesh, self.at, axis)
        changed = redistribute_axis(local, self.at[axis], self.target[axis], base, self.mesh, axis)
        self.at = replace_axis(self.at, axis, self.target[axis])
        return changed

    def _reduce(self, local: torch.Tensor, axes: list[int]) -> torch.Tensor:
        """Sums over axes: whatever else the local tensor is, it is added up element by element."""
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
        taken_off = [a for a in differing if isinstance(self.at[a], InterleavedShard)]
        if ragged is not None:
            taken_off.insert(0, ragged)
        for axis in taken_off:
            self.target = replace_axis(self.at, axis, Replicate())
            local = self._change(local, axis)
        put_on = [a for a in self._differing_from(final) if is_custom(final[a])]
        put_on.sort(key=lambda axis: isinstance(final[axis], RaggedShard))  # ragged comes last
        waiting = final
        for axis in put_on:  # stays a sum until its own axis is reduced and scattered at once
            now = self.at[axis]
            waiting_placement = now if isinstance(now, Partial) else Replicate()
            waiting = replace_axis(waiting, axis, waiting_placement)
        local = self._native_around_interleaved(local, waiting)
        for axis in put_on:
            self.target = replace_axis(self.at, axis, final[axis])
            local = self._change(local, axis)
        return local

    def _differing_from(self, final: Placements) -> list[int]:
        return [axis for axis, now in enumerate(self.at) if now != final[axis]]

    def _native_around_interleaved(self, local: torch.Tensor, target: Placements) -> torch.Tensor:
        """Lets torch redistribute to the target, on the tensor without interleaved axes."""
        hidden = [axis for axis, now in enumerate(self.at) if is_custom(now)]
        start, end, shape = self.at, target, tuple(self.meta.shape)
        for axis in hidden:
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
                    f"redistribute: axis {axis} is {now!r} and cannot become {then}; a shard "
                    f"becomes a sum only by computing one"
                )


def redistribute_backward(
    native: Callable[..., object], ctx: Any, grad_output: torch.Tensor | None
) -> object:
    """`Redistribute.backward` of torch/distributed/tensor/_redistribute.py, with this package's.

    The gradient of a Partial is a replica: torch ensures it where the gradient is a Shard, and this
    function where it has a placement of this package.
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
