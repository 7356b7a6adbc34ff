"""``torch.empty_like`` of a DTensor, with the strides that it has on one device.

DTensor's own ``empty_like`` caches the result's strides under a key without ``memory_format``
(``RuntimeSchemaInfo`` of ``aten.empty_like`` in torch/distributed/tensor/_ops/_tensor_ops.py), so
they are those of the first call; and the strides determine which element takes which draw.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta


def empty_like(source: Tensor, **options: Any) -> Tensor:
    """Returns an uninitialised tensor of ``source``'s shape and, for a DTensor, its placements.

    Args:
        source: a plain tensor or a DTensor; a Partial placement stays Partial.
        options: the options of ``torch.empty_like``.
    """
    if not isinstance(source, DTensor):
        return torch.empty_like(source, **options)
    stride = source.stride()
    single = torch.empty_strided(source.shape, stride, dtype=source.dtype, device="meta")
    single = torch.empty_like(single, **{n: options.get(n) for n in ("dtype", "memory_format")})
    spec = copy(source._spec)
    spec.tensor_meta = TensorMeta(single.shape, single.stride(), single.dtype)
    local = torch.empty_like(source._local_tensor, **options)
    return DTensor(local, spec, requires_grad=False)
