"""Kernels of attention, each of one tile or of one block."""

from plan_api.context_parallel.kernels.kernel import (
    AttentionGradients,
    AttentionKernel,
    AttentionOutput,
    TileOptions,
)
from plan_api.context_parallel.kernels.selection import select_block_kernel, select_kernel

__all__ = [
    "AttentionGradients",
    "AttentionKernel",
    "AttentionOutput",
    "TileOptions",
    "select_block_kernel",
    "select_kernel",
]
