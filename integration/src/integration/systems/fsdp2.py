"""fully_shard (FSDP2): every parameter a DTensor sharded on dim 0."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from integration.models import ModelShape
from integration.systems.base import AUTOCAST_DTYPES, System


class FullyShardedTwo(System):
    """``torch.distributed.fsdp.fully_shard`` on every transformer layer and on the root."""

    name = "fsdp2"
    supports_documents = True
    accepts_meta_model = True
    accepts_offload = True
    supports_all_optimizers = True
    supports_compile = True
    compute_dtypes = AUTOCAST_DTYPES

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Shards the model in place."""
        mesh = init_device_mesh(self.device.type, (world_size,), mesh_dim_names=("dp",))
        self.autocast(model)
        shard = partial(
            fully_shard,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(
                self.compute_dtype, torch.float32, cast_forward_inputs=False
            ),
            offload_policy=self.degrees.offload_policy,
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
