"""The matrices that a parameter consists of, and how each is sharded.

Note: terminology.
    matrix: what an optimizer computes on as a whole: a parameter, or one expert, head or projection
        of it, or some of its rows. The matrices of a parameter are consecutive in its storage.
    shard axis: the mesh axis over which fully_shard has sharded the parameter. Each of its ranks
        has a contiguous run of the flattened matrix, which may be empty. All these runs together
        are the base.
    inner axes: the mesh axes of tensor parallelism; with them the base is a shard of the matrix,
        of consecutive rows or columns, or of some in each part of a fused projection.
    owner: the rank of the shard axis that computes on the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fsdp.optim.matrix.split import ShardedRows, shard_rows
from ragged_shard import InterleavedShard, RaggedShard, dim_of, even_shape, local_shape

__all__ = ["Matrix", "check_even_shards", "matrices_of"]


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
        distinct_axes: mesh axes whose ranks have matrices of their own, such as other experts or
            heads; ranks of the other axes have the same matrix, or shards of it.
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
    distinct_axes: tuple[int, ...]
    local_slice: slice
    fixed_owner: int | None

    @property
    def is_inner_sharded(self) -> bool:
        """Whether inner axes shard the matrix."""
        return self.shape != self.base_shape

    @property
    def elements_of_all(self) -> tuple[int, ...]:
        """`elements_by_rank` for all ranks of inner axes alike: zeros if these divide unevenly."""
        mesh = self.mesh
        parts = math.prod(
            1 if mesh is None or dim_of(placement) is None else mesh.size(axis)
            for axis, placement in enumerate(self.placements)
        )
        is_even = parts * math.prod(self.base_shape) == math.prod(self.shape)
        return self.elements_by_rank if is_even else (0,) * len(self.elements_by_rank)

    @property
    def has_all_rows(self) -> bool:
        """Whether the base has all rows of the matrix, so that inner axes shard columns at most."""
        return self.shape[0] == self.base_shape[0]

    def row_strip(self, rows: range) -> Matrix:
        """Returns some rows as a matrix of its own; the base has to have all rows."""
        columns = self.base_shape[1]
        elements = range(rows.start * columns, rows.stop * columns)
        runs = [range(*ends) for ends in pairwise(accumulate(self.elements_by_rank, initial=0))]
        mesh, axis = self.mesh, self.axis
        local_run = runs[0 if mesh is None or axis is None else mesh.get_local_rank(axis)]
        local = _local_slice(elements, local_run)
        is_all = len(rows) == self.base_shape[0]
        return replace(
            self,
            name=self.name if is_all else f"{self.name}[{rows.start}:{rows.stop}]",
            shape=(len(rows), self.shape[1]),
            base_shape=(len(rows), columns),
            elements_by_rank=tuple(len(_intersection(elements, run)) for run in runs),
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


def matrices_of(
    param: torch.Tensor, rows: Sequence[int], name: str, optimizer_name: str
) -> list[Matrix]:
    """Returns the matrices of a parameter that have elements.

    Args:
        param: a plain tensor, or a DTensor that at most one mesh axis shards as `fully_shard` (or
            torch's, along dim 0) does, and others along dims, as tensor and expert parallelism do:
            by `Shard`, or `InterleavedShard` for fused projections.
        rows: rows of the matrices, from `matrix_rows`.
        name: name of the parameter, for errors.
        optimizer_name: for errors.

    Raises:
        ValueError: the placements are others, or an inner axis shards the rows of several matrices
            such that its ranks have neither equal parts of a matrix nor whole matrices.
    """
    if param.numel() == 0:
        return []
    shards = _shard_runs(param, name, optimizer_name)
    mesh = param.device_mesh if isinstance(param, DTensor) else None
    param_placements = param.placements if isinstance(param, DTensor) else ()
    stacked = param.ndim == 3
    placements = [_matrix_placement(placement, stacked) for placement in param_placements]
    stack_axes = tuple(
        axis
        for axis, placement in enumerate(param_placements)
        if axis != shards.axis and stacked and dim_of(placement) == 0
    )
    row_axes = [
        axis
        for axis, placement in enumerate(placements)
        if axis != shards.axis and dim_of(placement) == 0
    ]
    if shards.axis is not None:
        placements[shards.axis] = Replicate()
    sharded_rows = _sharded_rows(param, rows, shards, row_axes, name, optimizer_name)
    rank = 0 if mesh is None or shards.axis is None else mesh.get_local_rank(shards.axis)
    entries = shards.base_shape[0] if stacked else 1
    bounds = list(accumulate([one.local_rows for one in sharded_rows] * entries, initial=0))
    fixed_owner = _fixed_owner(param_placements, shards.axis)
    columns, matrices = shards.base_shape[-1], []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        elements = range(start * columns, stop * columns)
        one = sharded_rows[index % len(sharded_rows)]
        own_placements, distinct_axes = placements, stack_axes
        if one.chunks is None:  # whole matrices on each rank of the row axes, if there are any
            own_placements = _with_placement(placements, row_axes, Replicate())
            distinct_axes = (*stack_axes, *row_axes)
        elif len(rows) > 1:
            own = InterleavedShard(0, one.chunks) if one.chunks > 1 else Shard(0)
            own_placements = _with_placement(placements, row_axes, own)
        matrices.append(
            Matrix(
                name=name if len(bounds) == 2 else f"{name}[{index}]",
                shape=(one.rows, param.shape[-1]),
                base_shape=(stop - start, columns),
                mesh=mesh,
                axis=shards.axis,
                elements_by_rank=tuple(len(_intersection(elements, run)) for run in shards.runs),
                placements=tuple(own_placements),
                distinct_axes=distinct_axes,
                local_slice=_local_slice(elements, shards.runs[rank]),
                fixed_owner=fixed_owner,
            )
        )
    return [matrix for matrix in matrices if math.prod(matrix.shape)]


def check_even_shards(
    param: torch.Tensor, axes: Sequence[int], name: str, optimizer_name: str
) -> None:
    """Checks that mesh axes divide the parameter's dims evenly.

    Args:
        param: the parameter.
        axes: of its mesh; axes that replicate it are ignored.
        name: its name, for the error.
        optimizer_name: for the error.

    Raises:
        ValueError: an axis shards a dim unevenly; it names the parameter.
    """
    if not isinstance(param, DTensor):
        return
    for axis in axes:
        placement, ranks = param.placements[axis], param.device_mesh.size(axis)
        dim = dim_of(placement)
        if dim is not None and even_shape(param.shape, (ranks,), (placement,)) is None:
            raise ValueError(
                f"{optimizer_name}: expected parameter {name!r} of shape {tuple(param.shape)}, "
                f"placed as {param.placements}, to have even shards, got dim {dim} of size "
                f"{param.shape[dim]} on {ranks} ranks"
            )


def _sharded_rows(
    param: torch.Tensor,
    rows: Sequence[int],
    shards: _ShardRuns,
    row_axes: Sequence[int],
    name: str,
    optimizer_name: str,
) -> list[ShardedRows]:
    """Returns the rows of the matrices on this rank of the inner axes."""
    if not row_axes:
        return [ShardedRows(own, own, None) for own in rows]
    if len(rows) == 1:  # of any sizes, and over any number of axes
        return [ShardedRows(rows[0], shards.base_shape[-2], 1)]
    assert isinstance(param, DTensor)
    found = None
    if len(row_axes) == 1:
        placement = param.placements[row_axes[0]]
        chunks, unit = 1, 1
        if isinstance(placement, InterleavedShard):
            chunks, unit = placement.interleaves, placement.unit
        if unit == 1:
            found = shard_rows(rows, chunks, param.device_mesh.size(row_axes[0]))
    if found is None:
        raise ValueError(
            f"{optimizer_name}: expected one mesh axis to shard the rows of parameter {name!r}, "
            f"which is split into matrices of {tuple(rows)} rows, such that each of its ranks has "
            f"an equal part of a matrix or whole matrices, got placements {param.placements} on a "
            f"mesh of {tuple(param.device_mesh.shape)}; make each matrix a parameter, or place "
            f"fused projections as InterleavedShard"
        )
    return found


def _with_placement(
    placements: Sequence[Placement], axes: Sequence[int], placement: Placement
) -> list[Placement]:
    return [placement if axis in axes else other for axis, other in enumerate(placements)]


def _shard_runs(param: torch.Tensor, name: str, optimizer_name: str) -> _ShardRuns:
    if not isinstance(param, DTensor):
        return _ShardRuns(None, tuple(param.shape), (range(param.numel()),))
    mesh, placements = param.device_mesh, param.placements
    of_shards = [
        axis for axis, placement in enumerate(placements)
        if isinstance(placement, RaggedShard) or _divides_shards(axis, placements, mesh)
    ]  # fmt: skip
    unsupported = [
        placement for axis, placement in enumerate(placements)
        if axis not in of_shards
        and type(placement) not in (Replicate, Shard, InterleavedShard)
    ]  # fmt: skip
    axes = of_shards or ([0] if mesh.ndim == 1 and placements == (Shard(0),) else [])
    if unsupported or len(axes) > 1:
        raise ValueError(
            f"{optimizer_name}: expected parameter {name!r} to have RaggedShard on at most one "
            f"axis, as fully_shard places parameters, and Shard, InterleavedShard or Replicate on "
            f"the others, got placements {placements}"
        )
    axis = axes[0] if axes else None
    others = _with_placement(placements, axes, Replicate())
    base_shape = local_shape(param.shape, mesh, tuple(others))
    if axis is None:
        return _ShardRuns(None, base_shape, (range(math.prod(base_shape)),))
    placement, ranks = placements[axis], range(mesh.size(axis))
    if isinstance(placement, RaggedShard):
        runs = tuple(placement.interval(base_shape, rank) for rank in ranks)
        return _ShardRuns(axis, base_shape, runs)
    row, chunk = math.prod(base_shape[1:]), -(-base_shape[0] // len(ranks))
    ends = [min(chunk * rank, base_shape[0]) * row for rank in (*ranks, len(ranks))]
    return _ShardRuns(axis, base_shape, tuple(range(*pair) for pair in pairwise(ends)))


def _divides_shards(axis: int, placements: Sequence[Placement], mesh: DeviceMesh) -> bool:
    """Whether an axis divides the rows that each rank of the later axes has, as ZeRO-3 does."""
    placement = placements[axis]
    if not isinstance(placement, _StridedShard) or placement.dim != 0:
        return False
    later = [other for other in range(axis + 1, mesh.ndim) if dim_of(placements[other]) == 0]
    return placement.split_factor == math.prod(mesh.size(other) for other in later)


def _matrix_placement(placement: Placement, stacked: bool) -> Placement:
    """Returns the placement of one matrix; an axis that shards the stack has whole matrices."""
    dim = dim_of(placement)
    if dim is None or dim < int(stacked):
        return Replicate()
    if isinstance(placement, InterleavedShard):
        return placement.with_dim(dim - int(stacked))
    return Shard(dim - int(stacked))


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
