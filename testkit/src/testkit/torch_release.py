"""The installed release of torch, and differences between releases that tests depend on."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist

__all__ = [
    "FLATTENS_TWO_SHARDED_DIMS",
    "KEEPS_ORDER_OF_RANKS",
    "NO_FLATTENING",
    "NO_ORDER_OF_RANKS",
    "TORCH_RELEASE",
]

_major, _minor = torch.__version__.split(".")[:2]

#: Major and minor, as ``(2, 13)``.
TORCH_RELEASE = (int(_major), int(_minor))

#: Whether DTensor flattens two sharded dims into one, as attention does with batch and heads.
FLATTENS_TWO_SHARDED_DIMS = TORCH_RELEASE >= (2, 12)

#: The reason for which tests that need it are skipped.
NO_FLATTENING = "torch 2.11's DTensor flattens no two sharded dims (batch and heads)"

#: Whether a process group may have its ranks in an order of its own, as HFSDP's has.
KEEPS_ORDER_OF_RANKS = "sort_ranks" in inspect.signature(dist.new_group).parameters

#: The reason for which tests that need it are skipped.
NO_ORDER_OF_RANKS = "torch 2.11 sorts the ranks of every process group, so HFSDP is refused"
