"""The matrices that parameters are made of, and how their shards lie.

Note: the words of this package.
    matrix: what is computed on as a whole: a parameter, or one expert, head or projection of it,
        or some of its rows. They lie one behind the other in its parameter.
    cut axis: the mesh axis along which fully_shard has cut the parameter; each rank of it holds a
        run of the flattened matrix, perhaps none. What its ranks hold together is the base.
    inner axes: those of tensor parallelism, along which even the base is a part of the matrix.
    owner: the rank of the cut axis that computes on the matrix.
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

__all__ = ["Matrix", "Split", "SplitFunction", "matrices_of", "rows_of"]

Split: TypeAlias = int | Sequence[int] | None
SplitFunction: TypeAlias = Callable[[torch.Tensor], Split]


@dataclass(frozen=True)
class Matrix:
    """One matrix of a parameter.

    Attributes:
        name: of the parameter, and which of it.
        shape: rows and columns of the whole matrix.
        base: its rows and columns without what inner axes have cut off.
        mesh: of the parameter; None of what every rank has whole.
        axis: the cut axis; None if there is none.
        held: elements of the base by rank of the cut axis.
        placements: of the base on the mesh, before the cut axis is cut.
        part: which elements of the flattened local tensor of the parameter this rank holds of it.
        fixed: its owner, if the parameter was placed whole.
    """

    name: str
    shape: tuple[int, int]
    base: tuple[int, int]
    mesh: DeviceMesh | None
    axis: int | None
    held: tuple[int, ...]
    placements: tuple[Placement, ...]
    part: slice
    fixed: int | None

    @property
    def inner(self) -> bool:
        """Whether inner axes have cut it."""
        return self.shape != self.base

    def strip(self, rows: range) -> Matrix:
        """Some of the rows of the base, as a matrix that inner axes do not know of."""
        columns = self.base[1]
        wanted = range(rows.start * columns, rows.stop * columns)
        runs = [range(*ends) for ends in pairwise(accumulate(self.held, initial=0))]
        mesh, axis = self.mesh, self.axis
        here = runs[0 if mesh is None or axis is None else mesh.get_local_rank(axis)]
        own = _within(wanted, here)
        shape = (len(rows), columns)
        every = len(rows) == self.base[0]
        return replace(
            self,
            name=self.name if every else f"{self.name}[{rows.start}:{rows.stop}]",
            shape=shape,
            base=shape,
            held=tuple(len(_common(wanted, run)) for run in runs),
            placements=tuple(Replicate() for _ in self.placements),
            part=slice(self.part.start + own.start, self.part.start + own.stop),
        )


@dataclass(frozen=True)
class _Cut:
    """How a parameter lies: its cut axis, its base, and the runs of the flattened base."""

    axis: int | None
    base: tuple[int, ...]
    runs: tuple[range, ...]


def rows_of(
    split: Split | SplitFunction, param: torch.Tensor, name: str, who: str
) -> tuple[int, ...]:
    """The rows of the matrices that lie in two dims of a parameter.

    Args:
        split: so many equal matrices, the rows of each, one (None); or a function of the parameter.
        param: of two dims, or of three: then each of its entries is split likewise.
        name: for errors.
        who: the optimizer, for errors.

    Raises:
        ValueError: the parameter has other dims, is not contiguous, or cannot be cut so.
    """
    if param.ndim not in (2, 3) or param.is_complex():
        raise ValueError(
            f"{who}: parameter {name!r} is {param.dtype} of shape {tuple(param.shape)}; wants real "
            f"matrices, of 2 dims, or 3 for stacked ones: give others, embeddings and output "
            f"layers to AdamW, in a group with use_{who.lower()}=False"
        )
    if not param.is_contiguous():
        raise ValueError(
            f"{who}: parameter {name!r} of shape {tuple(param.shape)} has strides "
            f"{param.stride()}; wants a contiguous one"
        )
    if callable(split):
        split = split(param)
    rows = param.shape[-2]
    if split is None:
        found = [rows]
    elif isinstance(split, SupportsIndex):
        split = operator.index(split)
        found = [rows // split] * split if split > 0 and rows % split == 0 else []
    else:
        found = [operator.index(part) for part in split]
    if sum(found) != rows or (rows and min(found) < 1):
        raise ValueError(
            f"{who}: split={split!r} of parameter {name!r}, whose matrices have {rows} rows; wants "
            f"a number that divides them, or the rows of each matrix"
        )
    return tuple(found)


def matrices_of(param: torch.Tensor, rows: Sequence[int], name: str, who: str) -> list[Matrix]:
    """The matrices of a parameter.

    Args:
        param: plain, or a DTensor that one axis at most cuts as `fully_shard` does (or as torch's,
            along dim 0), and others along dims, as tensor and expert parallelism do.
        rows: of the matrices in each entry, as `rows_of` has them.
        name: for errors.
        who: the optimizer, for errors.

    Raises:
        ValueError: other placements, or inner axes that cut what is split.
    """
    if param.numel() == 0:
        return []
    cut = _cut_of(param, name, who)
    mesh = param.device_mesh if isinstance(param, DTensor) else None
    placements = param.placements if isinstance(param, DTensor) else ()
    stacked = param.ndim == 3
    around = tuple(_of_entry(one, stacked) for one in placements)
    inner = any(isinstance(one, Shard) for at, one in enumerate(around) if at != cut.axis)
    if inner and len(rows) > 1:
        raise ValueError(
            f"{who}: parameter {name!r} is split into {len(rows)} matrices and placed as "
            f"{placements}, which cuts them; make it a parameter for each"
        )
    here = 0 if mesh is None or cut.axis is None else mesh.get_local_rank(cut.axis)
    whole_rows = list(rows) if not inner else [cut.base[-2]]
    entries = cut.base[0] if stacked else 1
    bounds = list(accumulate(whole_rows * entries, initial=0))
    fixed = _owner_of_whole(placements, cut.axis)
    columns, found = cut.base[-1], []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        run = range(start * columns, stop * columns)
        base = (stop - start, columns)
        found.append(
            Matrix(
                name if len(bounds) == 2 else f"{name}[{number}]",
                (param.shape[-2], param.shape[-1]) if inner else base,
                base,
                mesh,
                cut.axis,
                tuple(len(_common(run, other)) for other in cut.runs),
                around,
                _within(run, cut.runs[here]),
                fixed,
            )
        )
    return [matrix for matrix in found if math.prod(matrix.shape)]


def _cut_of(param: torch.Tensor, name: str, who: str) -> _Cut:
    if not isinstance(param, DTensor):
        return _Cut(None, tuple(param.shape), (range(param.numel()),))
    mesh, placements = param.device_mesh, param.placements
    wrong = [
        one for one in placements if type(one) not in (Replicate, Shard)
        and not isinstance(one, RaggedShard)
    ]  # fmt: skip
    ragged = [axis for axis, one in enumerate(placements) if isinstance(one, RaggedShard)]
    axes = ragged or ([0] if mesh.ndim == 1 and placements == (Shard(0),) else [])
    if wrong or len(axes) > 1:
        raise ValueError(
            f"{who}: parameter {name!r} is placed as {placements}; wants RaggedShard on one axis, "
            f"as fully_shard places parameters, and Shard or Replicate on the others"
        )
    axis = axes[0] if axes else None
    others = [Replicate() if at == axis else one for at, one in enumerate(placements)]
    base, _ = compute_local_shape_and_global_offset(param.shape, mesh, others)
    if axis is None:
        return _Cut(None, tuple(base), (range(math.prod(base)),))
    placement, ranks = placements[axis], range(mesh.size(axis))
    if isinstance(placement, RaggedShard):
        return _Cut(axis, tuple(base), tuple(placement.interval(base, rank) for rank in ranks))
    row, chunk = math.prod(base[1:]), -(-base[0] // len(ranks))
    ends = [min(chunk * rank, base[0]) * row for rank in (*ranks, len(ranks))]
    return _Cut(axis, tuple(base), tuple(range(*pair) for pair in pairwise(ends)))


def _of_entry(placement: Placement, stacked: bool) -> Placement:
    """How one matrix of a parameter is placed on an axis: whole where the axis cuts the stack."""
    if not isinstance(placement, Shard):
        return Replicate()
    dim = placement.dim - int(stacked)
    return Replicate() if dim < 0 else Shard(dim)


def _owner_of_whole(placements: Sequence[Placement], axis: int | None) -> int | None:
    """The rank that a placement gives the whole parameter as one unit."""
    placement = None if axis is None else placements[axis]
    whole = isinstance(placement, RaggedShard) and not placement.dims
    return placement.owner if whole and isinstance(placement, RaggedShard) else None


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _within(run: range, local: range) -> slice:
    """Where the part of a run that is local lies in the local tensor."""
    common = _common(run, local)
    if not common:
        return slice(0, 0)
    return slice(common.start - local.start, common.stop - local.start)
