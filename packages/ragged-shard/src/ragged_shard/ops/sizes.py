"""Sizes in the arguments of views: what -1 stands for, and what the local operator is given."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ragged_shard.spec import local_shape, meta_of


def resolved(size: object, numel: int) -> tuple[int, ...]:
    """A view's size with its -1 worked out, for a tensor of so many elements."""
    assert isinstance(size, list | tuple)
    known = math.prod(length for length in size if length != -1)
    return tuple(numel // known if length == -1 else length for length in size)


def local_size(output: DTensorSpec) -> Sequence[int]:
    """The size of this rank's part of an output, to stand in place of the global one."""
    return local_shape(meta_of(output).shape, output.mesh, output.placements)
