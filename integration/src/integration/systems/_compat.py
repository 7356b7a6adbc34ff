"""What differs between the supported versions of torch."""

import inspect

import torch.distributed as dist

__all__ = ["keeps_order_of_ranks"]


def keeps_order_of_ranks() -> bool:
    """Whether a group may have its ranks in any order, as HFSDP needs: not in torch 2.11."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters
