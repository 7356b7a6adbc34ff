"""Runs of tensors that follow each other in memory: one operator takes each run as one tensor.

The sharded parameters of a group are views of its buffer, and their gradients of one new tensor.
Padding ends a run, so nothing but the tensors themselves is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["contiguous_runs", "flat_view"]


def contiguous_runs(
    columns: Sequence[Sequence[torch.Tensor]],
    labels: Sequence[object] | None = None,
    *,
    nbytes: int = 1,
) -> list[list[int]]:
    """Returns the indices of tensors, those that follow each other in memory in one list.

    The order is that of the tensors' storages in the first list, and does not depend on addresses.

    Args:
        columns: lists of plain tensors of one length, as of parameters and of their gradients:
            tensors follow each other if they do in each list.
        labels: tensors of one run have equal labels; None: all are equal.
        nbytes: a tensor of the first list is followed by another one only if its size in bytes is a
            multiple.
    """
    first, places = columns[0], [list(map(_place, column)) for column in columns]
    sizes = [tensor.numel() for tensor in first]
    storages = {storage: n for n, (storage, *_) in enumerate(reversed(places[0]))}
    runs: list[list[int]] = []

    def position(i: int) -> tuple[int, int, int]:
        storage, begin, _ = places[0][i]
        return -storages[storage], begin, sizes[i]  # an empty tensor is before one at its place

    for i in sorted(range(len(first)), key=position):
        last = runs[-1][-1] if runs else i
        follows = (
            last != i
            and first[last].nbytes % nbytes == 0
            and (labels is None or labels[last] == labels[i])
            and all(_follows(column[last], column[i], sizes[last]) for column in places)
        )
        if follows:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def flat_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a tensor of one dim over tensors of a run, or the only tensor as it is.

    It shares the memory of all, and the version (``_version``) of the first.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


_Place = tuple[int, int, torch.dtype]


def _place(tensor: torch.Tensor) -> _Place:
    """Returns the storage of a tensor, its first element there, and its dtype."""
    # Not the address, which fake tensors do not have. No tensor follows one that is not contiguous.
    begin = int(tensor.storage_offset()) if tensor.is_contiguous() else -tensor.numel() - 1
    return tensor.untyped_storage()._cdata, begin, tensor.dtype


def _follows(before: _Place, after: _Place, size: int) -> bool:
    return (before[0], before[1] + size, before[2]) == after
