"""Redistributes lists of DTensors, those with the same collective in one.

`api` has the functions, `batch` sorts tensors by the collective that they need, `exchanges` are the
all-gathers and all-to-alls; sums go through `fused_comm.in_flight_bucket`.
"""

from fused_comm.redistribute.api import (
    Pending,
    all_gather_many,
    all_reduce_many,
    redistribute_many,
    reduce_scatter_many,
)

__all__ = [
    "Pending",
    "all_gather_many",
    "all_reduce_many",
    "redistribute_many",
    "reduce_scatter_many",
]
