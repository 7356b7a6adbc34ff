"""What a bucket is filled into: memory of torch's allocator, or anybody else's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

__all__ = ["Allocate", "FlatBuffer", "allocate"]


class FlatBuffer(Protocol):
    """A flat piece of memory for one bucket.

    A gradient that was all-reduced is a view of it, so it is released when the bucket's next
    gradients have taken their place, and not before.
    """

    @property
    def data(self) -> torch.Tensor:
        """One-dimensional and contiguous, of the elements, dtype and device that were asked."""
        ...

    def release(self) -> None:
        """Says that nobody reads it any more."""
        ...


# Elements, dtype, device.
Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], FlatBuffer]


@dataclass(frozen=True, eq=False)
class _Allocated:
    data: torch.Tensor

    def release(self) -> None:
        """Torch counts the views."""


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> FlatBuffer:
    """A buffer of torch's allocator."""
    return _Allocated(torch.empty(numel, dtype=dtype, device=device))
