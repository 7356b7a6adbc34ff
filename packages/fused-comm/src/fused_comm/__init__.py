"""Bucketed collectives for DTensors: one per bucket where DTensor issues one per tensor.

=================  ==================================================================
grad_reducer       `GradReducer`: reduces gradients in buckets during backward
redistribute       `redistribute_many`: redistributes lists of DTensors together
functional, ddp    collectives by name; a communication hook for DDP
diagnosis          `diagnosis.Watch`: reports hangs
reduction          what one gradient needs: axes to reduce and to scatter
bucket             where gradients are placed in the buffers that are reduced
in_flight_bucket   issues a bucket's collectives
sharding           how torch shards a tensor along mesh axes
process_groups     several mesh axes as one process group
agreement          compares ranks before they communicate
=================  ==================================================================
"""

from fused_comm.grad_reducer import FlatBuffer, GradReducer
from fused_comm.redistribute import (
    Pending,
    all_gather_many,
    all_reduce_many,
    redistribute_many,
    reduce_scatter_many,
)

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
