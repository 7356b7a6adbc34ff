"""One collective where DTensor makes hundreds."""

from fused_comm.batched import (
    Pending,
    all_gather_many,
    all_reduce_many,
    redistribute_many,
    reduce_scatter_many,
)
from fused_comm.flat_buffer import FlatBuffer
from fused_comm.reducer import GradReducer

__version__ = "0.1.0"

__all__ = [
    "FlatBuffer",
    "GradReducer",
    "Pending",
    "all_gather_many",
    "all_reduce_many",
    "redistribute_many",
    "reduce_scatter_many",
]
