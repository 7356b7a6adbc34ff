"""``torch.empty_like`` of a DTensor, with the strides that it has on one device.

DTensor's own keeps the result's strides in a cache whose key leaves ``memory_format`` out
(``RuntimeSchemaInfo`` of ``aten.empty_like`` in torch/distributed/tensor/_ops/_tensor_ops.py), so
that they are those of the first call; and the strides decide which element draws what.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta


def empty_like(source: Tensor, **options: Any) -> Tensor:
    """Return an uninitialised tensor of ``source``'s shape and, for a DTensor, its placements.

    Args:
        source: plain or distributed; a Partial placement stays one.
        options: of ``torch.empty_like``.
    """
    if not isinstance(source, DTensor):
        return torch.empty_like(source, **options)
    stride = source.stride()
    whole = torch.empty_strided(source.shape, stride, dtype=source.dtype, device="meta")
    kept = {name: options.get(name) for name in ("dtype", "memory_format")}
    whole = torch.empty_like(whole, **kept)
    spec = copy(source._spec)
    spec.tensor_meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    local = torch.empty_like(source._local_tensor, **options)
    return DTensor(local, spec, requires_grad=False)
