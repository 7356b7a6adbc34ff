"""fsdp's fully_shard: parameters are RaggedShard, in units of whole optimizer blocks.

It is imported on use, as the other systems need only torch.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from integration.errors import UsageError
from integration.models import ModelShape
from integration.systems.base import AUTOCAST_DTYPES, System
from integration.systems.degrees import check_axes

# Rows of a block, as for the paper's 8-bit Adam (veScale-FSDP, section 6.3).
BLOCK_ROWS = 32


class FullyShardedBuffers(System):
    """``fsdp.fully_shard`` on every transformer layer and on the root."""

    name = "fsdp"
    supports_documents = True
    native = False
    accepts_meta_model = True
    needs_dist_rng_for_init = True
    accepts_placements = True
    accepts_offload = True
    accepts_send_dtype = True
    supports_all_optimizers = True
    on_buffers = True
    supports_compile = True
    compute_dtypes = AUTOCAST_DTYPES

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Refuses placements of two axes, as the mesh has one, and a dtype in which none sends."""
        del shape
        if self.degrees.send_dtype is not None and world_size == 1:
            raise UsageError(
                f"--send-dtype {self.degrees.send_dtype}: expected at least 2 ranks, which send"
                " each other gradients, got 1; give more --ranks, or leave --send-dtype out"
            )
        if self.degrees.placements is not None:
            check_axes(self.degrees.placements, 1)

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Shards the model in place."""
        from fsdp import MixedPrecisionPolicy, fully_shard

        self.autocast(model)
        mesh = init_device_mesh(self.device.type, (world_size,), mesh_dim_names=("dp",))
        shard = partial(
            fully_shard,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(
                self.compute_dtype, torch.float32, cast_forward_inputs=False
            ),
            shard_placement_fn=granularity,
            placements=self.degrees.placements,
            offload_policy=self.degrees.offload_policy,
            send_dtype=self.degrees.dtype_sent,
        )
        for layer in shape.layers_of(model):
            shard(layer)
        shard(model)
        return model

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Reduce-scatters in the last microbatch only."""
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        return nullcontext()


def granularity(parameter: nn.Parameter) -> Any:
    """Returns the granularity of a parameter: 32 rows for a matrix."""
    from fsdp import Rows

    return Rows(BLOCK_ROWS) if parameter.ndim == 2 else None
