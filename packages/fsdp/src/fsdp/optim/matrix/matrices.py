"""The matrices that a parameter consists of, and how each is sharded.

Note: terminology.
    matrix: what an optimizer computes on as a whole: a parameter, or one expert, head or projection
        of it, or some of its rows. The matrices of a parameter are consecutive in its storage.
    shard axis: the mesh axis over which fully_shard has sharded the parameter. Each of its ranks
        has a contiguous run of the flattened matrix, which may be empty. All these runs together
        are the base.
    inner axes: the mesh axes of tensor parallelism; with them the base is a shard of the matrix.
    owner: the rank of the shard axis that computes on the matrix.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import SupportsIndex, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from ragged_shard import RaggedShard

__all__ = ["Matrix", "Split", "SplitFunction", "matrices_of", "matrix_rows"]

Split: TypeAlias = int | Sequence[int] | None
SplitFunction: TypeAlias = Callable[[torch.Tensor], Split]


@dataclass(frozen=True)
class Matrix:
    """One matrix of a parameter.

    Attributes:
        name: name of the parameter, with the index of the matrix if there are several.
        shape: rows and columns of the matrix.
        base_shape: rows and columns of the base: of the matrix without the shards of inner axes.
        mesh: mesh of the parameter; None if it is not a DTensor.
        axis: the shard axis; None if there is none.
        elements_by_rank: elements of the base on each rank of the shard axis.
        placements: placements of the matrix on the mesh, with the shard axis replicated.
        local_slice: this rank's elements of the matrix in the parameter's flattened local tensor.
        fixed_owner: the owner if the parameter was placed with `Whole()`, else None.
    """

    name: str
    shape: tuple[int, int]
    base_shape: tuple[int, int]
    mesh: DeviceMesh | None
    axis: int | None
    elements_by_rank: tuple[int, ...]
    placements: tuple[Placement, ...]
    local_slice: slice
    fixed_owner: int | None

    @property
    def is_inner_sharded(self) -> bool:
        """Whether inner axes shard the matrix."""
        return self.shape != self.base_shape

    def row_strip(self, rows: range) -> Matrix:
        """Returns some rows of the base as a matrix that inner axes do not shard."""
        columns = self.base_shape[1]
        elements = range(rows.start * columns, rows.stop * columns)
        runs = [range(*ends) for ends in pairwise(accumulate(self.elements_by_rank, initial=0))]
        mesh, axis = self.mesh, self.axis
        local_run = runs[0 if mesh is None or axis is None else mesh.get_local_rank(axis)]
        local = _local_slice(elements, local_run)
        shape = (len(rows), columns)
        is_all = len(rows) == self.base_shape[0]
        return replace(
            self,
            name=self.name if is_all else f"{self.name}[{rows.start}:{rows.stop}]",
            shape=shape,
            base_shape=shape,
            elements_by_rank=tuple(len(_intersection(elements, run)) for run in runs),
            placements=tuple(Replicate() for _ in self.placements),
            local_slice=slice(
                self.local_slice.start + local.start, self.local_slice.start + local.stop
            ),
        )


@dataclass(frozen=True)
class _ShardRuns:
    """The shard axis of a parameter, its base, and each rank's run of the flattened base."""

    axis: int | None
    base_shape: tuple[int, ...]
    runs: tuple[range, ...]


def matrix_rows(
    split: Split | SplitFunction, param: torch.Tensor, name: str, optimizer_name: str
) -> tuple[int, ...]:
    """Returns the rows of each matrix in two dims of a parameter.

    Args:
        split: the number of matrices of equal size, the rows of each, or None for one matrix; or a
            function of the parameter that returns one of these.
        param: has two dims, or three; each entry of the first of three dims is split equally.
        name: name of the parameter, for errors.
        optimizer_name: for errors.

    Raises:
        ValueError: the parameter has other dims, is not contiguous, or `split` does not fit.
    """
    if param.ndim not in (2, 3) or param.is_complex():
        raise ValueError(
            f"{optimizer_name}: expected parameter {name!r} to be a real matrix of 2 dims, or 3 "
            f"for stacked ones, got {param.dtype} of shape {tuple(param.shape)}; optimize other "
            f"parameters, embeddings and output layers by AdamW, in a group with "
            f"use_{optimizer_name.lower()}=False"
        )
    if not param.is_contiguous():
        raise ValueError(
            f"{optimizer_name}: expected parameter {name!r} of shape {tuple(param.shape)} to be "
            f"contiguous, got strides {param.stride()}"
        )
    if callable(split):
        split = split(param)
    total = param.shape[-2]
    if split is None:
        rows = [total]
    elif isinstance(split, SupportsIndex):
        split = operator.index(split)
        rows = [total // split] * split if split > 0 and total % split == 0 else []
    else:
        rows = [operator.index(part) for part in split]
    if sum(rows) != total or (total and min(rows) < 1):
        raise ValueError(
            f"{optimizer_name}: expected split of parameter {name!r} to be a divisor of its "
            f"{total} rows, or the rows of each matrix, got {split!r}"
        )
    return tuple(rows)


def matrices_of(
    param: torch.Tensor, rows: Sequence[int], name: str, optimizer_name: str
) -> list[Matrix]:
    """Returns the matrices of a parameter that have elements.

    Args:
        param: a plain tensor, or a DTensor that at most one mesh axis shards as `fully_shard` (or
            torch's, along dim 0) does, and others along dims, as tensor and expert parallelism do.
        rows: rows of the matrices, from `matrix_rows`.
        name: name of the parameter, for errors.
        optimizer_name: for errors.

    Raises:
        ValueError: the placements are others, or inner axes shard a parameter that is split.
    """
    if param.numel() == 0:
        return []
    shards = _shard_runs(param, name, optimizer_name)
    mesh = param.device_mesh if isinstance(param, DTensor) else None
    param_placements = param.placements if isinstance(param, DTensor) else ()
    stacked = param.ndim == 3
    placements = tuple(
        _matrix_placement(param_placement, stacked) for param_placement in param_placements
    )
    inner = any(isinstance(p, Shard) for axis, p in enumerate(placements) if axis != shards.axis)
    if inner and len(rows) > 1:
        raise ValueError(
            f"{optimizer_name}: expected parameter {name!r}, which is split into {len(rows)} "
            f"matrices, not to be sharded by tensor parallelism, got placements "
            f"{param_placements}; make each matrix a parameter"
        )
    rank = 0 if mesh is None or shards.axis is None else mesh.get_local_rank(shards.axis)
    base_rows = list(rows) if not inner else [shards.base_shape[-2]]
    entries = shards.base_shape[0] if stacked else 1
    bounds = list(accumulate(base_rows * entries, initial=0))
    fixed_owner = _fixed_owner(param_placements, shards.axis)
    columns, matrices = shards.base_shape[-1], []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        elements = range(start * columns, stop * columns)
        base_shape = (stop - start, columns)
        matrices.append(
            Matrix(
                name=name if len(bounds) == 2 else f"{name}[{index}]",
                shape=(param.shape[-2], param.shape[-1]) if inner else base_shape,
                base_shape=base_shape,
                mesh=mesh,
                axis=shards.axis,
                elements_by_rank=tuple(len(_intersection(elements, run)) for run in shards.runs),
                placements=placements,
                local_slice=_local_slice(elements, shards.runs[rank]),
                fixed_owner=fixed_owner,
            )
        )
    return [matrix for matrix in matrices if math.prod(matrix.shape)]


def _shard_runs(param: torch.Tensor, name: str, optimizer_name: str) -> _ShardRuns:
    if not isinstance(param, DTensor):
        return _ShardRuns(None, tuple(param.shape), (range(param.numel()),))
    mesh, placements = param.device_mesh, param.placements
    unsupported = [
        placement for placement in placements if type(placement) not in (Replicate, Shard)
        and not isinstance(placement, RaggedShard)
    ]  # fmt: skip
    ragged = [
        axis for axis, placement in enumerate(placements) if isinstance(placement, RaggedShard)
    ]
    axes = ragged or ([0] if mesh.ndim == 1 and placements == (Shard(0),) else [])
    if unsupported or len(axes) > 1:
        raise ValueError(
            f"{optimizer_name}: expected parameter {name!r} to have RaggedShard on at most one "
            f"axis, as fully_shard places parameters, and Shard or Replicate on the others, got "
            f"placements {placements}"
        )
    axis = axes[0] if axes else None
    others = [Replicate() if n == axis else placement for n, placement in enumerate(placements)]
    base_shape, _ = compute_local_shape_and_global_offset(param.shape, mesh, others)
    if axis is None:
        return _ShardRuns(None, tuple(base_shape), (range(math.prod(base_shape)),))
    placement, ranks = placements[axis], range(mesh.size(axis))
    if isinstance(placement, RaggedShard):
        runs = tuple(placement.interval(base_shape, rank) for rank in ranks)
        return _ShardRuns(axis, tuple(base_shape), runs)
    row, chunk = math.prod(base_shape[1:]), -(-base_shape[0] // len(ranks))
    ends = [min(chunk * rank, base_shape[0]) * row for rank in (*ranks, len(ranks))]
    return _ShardRuns(axis, tuple(base_shape), tuple(range(*pair) for pair in pairwise(ends)))


def _matrix_placement(placement: Placement, stacked: bool) -> Placement:
    """Returns the placement of one matrix; an axis that shards the stack has whole matrices."""
    if not isinstance(placement, Shard):
        return Replicate()
    dim = placement.dim - int(stacked)
    return Replicate() if dim < 0 else Shard(dim)


def _fixed_owner(placements: Sequence[Placement], axis: int | None) -> int | None:
    """Returns the rank on which the parameter was placed as a whole."""
    placement = None if axis is None else placements[axis]
    whole = isinstance(placement, RaggedShard) and not placement.dims
    return placement.owner if whole and isinstance(placement, RaggedShard) else None


def _intersection(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _local_slice(elements: range, local: range) -> slice:
    """Returns the elements that are in a rank's run, as a slice of this run."""
    common = _intersection(elements, local)
    if not common:
        return slice(0, 0)
    return slice(common.start - local.start, common.stop - local.start)
