"""Which kernel computes attention: by the device, the dtype and the mask."""

from __future__ import annotations

import torch

from plan_api._compat import has_triton
from plan_api.context_parallel.kernels.cpu import CpuFlash
from plan_api.context_parallel.kernels.cuda import CudaEfficient, CudaFlash
from plan_api.context_parallel.kernels.flex import Flex
from plan_api.context_parallel.kernels.kernel import AttentionKernel
from plan_api.context_parallel.kernels.operators import Operators

__all__ = ["select_block_kernel", "select_kernel"]

_FLEX_FEATURES = 16  # of a head at least, below which triton multiplies no matrices


def select_kernel(
    query: torch.Tensor, scale: float | None, *, has_dropout: bool = False
) -> AttentionKernel:
    """Selects the kernel for the device, dtype and number of features of queries.

    Args:
        query: the queries, with groups.
        scale: of products before the softmax; None: by the root of the number of features.
        has_dropout: whether weights are dropped, which fused kernels do by other masks.

    Raises:
        NotImplementedError: no fused kernel of the CPU or of CUDA returns the log-sum-exp for them.
    """
    device, groups = query.device.type, query.shape[2]
    half = query.dtype in (torch.float16, torch.bfloat16)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if has_dropout:
        return Operators(scale, groups)
    if device == "cpu" and query.dtype.is_floating_point:
        return CpuFlash(scale, groups)
    if device == "cuda" and half and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0:
        return CudaFlash(scale, groups)
    if device == "cuda" and (half or query.dtype is torch.float32):
        return CudaEfficient(scale, groups)
    if device not in ("cpu", "cuda") and query.dtype.is_floating_point:
        return Operators(scale, groups)
    raise NotImplementedError(
        f"torch has no fused attention for {query.dtype} on {device!r} that returns the "
        f"log-sum-exp, which ring and all-gather need; use method='ulysses'"
    )


def select_block_kernel(
    query: torch.Tensor, scale: float | None, *, has_dropout: bool = False
) -> AttentionKernel | None:
    """Selects the kernel of whole blocks, other than those of causal or full attention.

    It takes one call, of a compiled kernel, instead of one for each tile.

    Args:
        query: as in `select_kernel`.
        scale: as in `select_kernel`.
        has_dropout: whether weights are dropped.

    Returns:
        FlexAttention where torch compiles it for training: on CUDA with triton, for 16 and 32 bits
        and at least 16 features; None: blocks are divided into tiles.
    """
    compiles = query.device.type == "cuda" and has_triton()
    narrow = query.dtype in (torch.float16, torch.bfloat16, torch.float32)
    if has_dropout or not compiles or not narrow or query.shape[-1] < _FLEX_FEATURES:
        return None
    return Flex(query.shape[-1] ** -0.5 if scale is None else scale, query.shape[2])
