"""Which rows of a parameter are separate matrices, and which of them a rank of TP has."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import SupportsIndex, TypeAlias

import torch

__all__ = [
    "ShardedRows", "Split", "SplitFunction", "SplitOption", "SplitPatterns", "matrix_rows",
    "shard_rows", "split_by_name",
]  # fmt: skip

Split: TypeAlias = int | Sequence[int] | None
SplitFunction: TypeAlias = Callable[[torch.Tensor], Split]
SplitPatterns: TypeAlias = Mapping[str, Split | SplitFunction]
SplitOption: TypeAlias = Split | SplitFunction | SplitPatterns


@dataclass(frozen=True)
class ShardedRows:
    """The rows of a matrix, and how a mesh axis shards them.

    Attributes:
        rows: rows of the matrix.
        local_rows: rows of the matrix on each rank of the axis that has some.
        chunks: number of equal chunks of the rows, each of which the axis shards evenly; None if
            each rank of the axis has a matrix of its own, with all rows.
    """

    rows: int
    local_rows: int
    chunks: int | None


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


def split_by_name(patterns: SplitPatterns, name: str, optimizer_name: str) -> str | None:
    """Returns the pattern that matches all of a parameter's name, or None.

    Args:
        patterns: regular expressions, and how the parameters that they match are split.
        name: name of the parameter.
        optimizer_name: for errors.

    Raises:
        ValueError: a pattern is not a regular expression, or several patterns match.
    """
    matches = []
    for pattern in patterns:
        try:
            if re.fullmatch(pattern, name):
                matches.append(pattern)
        except re.error as error:
            raise ValueError(
                f"{optimizer_name}: expected the keys of split to be regular expressions, got "
                f"{pattern!r}: {error}"
            ) from None
    if len(matches) > 1:
        raise ValueError(
            f"{optimizer_name}: expected one pattern of split to match parameter {name!r}, got "
            f"{matches}; make the patterns exclude each other"
        )
    return matches[0] if matches else None


def shard_rows(rows: Sequence[int], chunks: int, ranks: int) -> list[ShardedRows] | None:
    """Returns the matrices of one rank if an axis shards each chunk of the rows evenly.

    A matrix of whole chunks has an equal part on each rank. Where each chunk is divided into
    smaller matrices, such as heads, each rank has whole matrices, of the same sizes on all ranks::

        rows (4, 4, 4), chunks 3, 2 ranks          rows (2, 2, 4, 4), chunks 3, 2 ranks
        rank 0: 2 rows of each matrix              rank 0: matrix 0, 2 rows of matrices 2 and 3
        rank 1: 2 rows of each matrix              rank 1: matrix 1, 2 rows of matrices 2 and 3

    Args:
        rows: of all matrices, in order.
        chunks: equal chunks of all rows, each of which is sharded; 1 for `Shard`.
        ranks: of the axis.

    Returns:
        The matrices in the order of a rank's rows; None if neither is the case for a matrix.
    """
    if ranks == 1:
        return [ShardedRows(own, own, None) for own in rows]
    chunk = sum(rows) // chunks
    if sum(rows) % chunks or chunk % ranks:
        return None
    found: list[ShardedRows] = []
    remaining = list(rows)
    while remaining:
        if remaining[0] % chunk == 0:
            own = remaining.pop(0)
            found.append(ShardedRows(own, own // ranks, own // chunk))
            continue
        ends = list(accumulate(remaining))
        if chunk not in ends:
            return None
        in_chunk = [remaining.pop(0) for _ in range(ends.index(chunk) + 1)]
        on_rank = in_chunk[: len(in_chunk) // ranks]
        if in_chunk != on_rank * ranks:
            return None
        found += [ShardedRows(own, own, None) for own in on_rank]
    return found
