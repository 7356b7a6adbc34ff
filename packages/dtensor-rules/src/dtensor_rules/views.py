"""Where a view begins in the tensor that it is a view of."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from dtensor_rules.rule import Call


def view_offsets(call: Call) -> list[int]:
    """The storage offset of each result of a view, from that of its argument.

    A wrapper holds no data, but autograd finds the place of a view in its base by it.

    Args:
        call: of an operator whose results are views of its first argument.

    Returns:
        elements of the global tensor, one number per result.
    """
    base = call.args[0]
    assert isinstance(base, DTensor)
    # Of the shape and strides that the wrapper has; a meta tensor has no memory either.
    stand_in = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    results = pytree.tree_leaves(call.op(stand_in, *call.args[1:], **call.kwargs))
    return [result.storage_offset() for result in results]
