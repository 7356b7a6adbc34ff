"""Means without overflow."""

from __future__ import annotations

import math

import torch

from fused_comm.bucket import Route

__all__ = ["divisors"]


def divisors(route: Route) -> tuple[float, float]:
    """What a buffer is divided by before it is summed, and after.

    A mean of fp16 numbers may be small where their sum is too large to be a number: half of the
    division, by a power of two so that nothing is rounded, is done before (as
    torch/distributed/fsdp does it). Other dtypes have fp32's range: they are divided once, and by a
    power of two before, when they are copied anyway.
    """
    if not route.averaged or route.ranks == 1:
        return 1.0, 1.0
    before = float(route.ranks) if route.ranks & (route.ranks - 1) == 0 else 1.0
    if route.dtype == torch.float16:
        before = 2.0 ** math.ceil(math.log2(route.ranks) / 2)
    return before, route.ranks / before
