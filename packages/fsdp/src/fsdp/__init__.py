"""``fully_shard`` without copies: parameters and gradients are views of distributed buffers."""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)

from fsdp._compat import DataParallelMeshDims, GradientReductionHandle
from fsdp.api import (
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
    uninstall,
)
from fsdp.collectives.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from fsdp.mesh import STRATEGIES, Roles
from fsdp.mesh.granularity import Block, Granularity, Rows, Whole
from fsdp.module import FSDPModule
from fsdp.quantized import Tiles

__version__ = "0.1.0"

__all__ = [
    "STRATEGIES",
    "Block",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "Granularity",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Roles",
    "Rows",
    "Tiles",
    "UnshardHandle",
    "Whole",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "fully_shard",
    "get_total_norm",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "uninstall",
]
