"""FullyShardedDataParallel (FSDP1): parameters sharded as one flat tensor per layer."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from integration.models import ModelShape
from integration.systems.base import System


class FullyShardedOne(System):
    """``torch.distributed.fsdp.FullyShardedDataParallel``, one unit per transformer layer."""

    name = "fsdp1"
    supports_documents = True
    supports_compile = True
    compute_dtypes = (torch.bfloat16,)

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Wraps every layer and the root."""
        # With a mesh its state dicts contain DTensors, as FSDP2's do, instead of ShardedTensors.
        mesh = init_device_mesh(self.device.type, (world_size,), mesh_dim_names=("dp",))
        layer_types = {type(layer) for layer in shape.layers_of(model)}
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=partial(
                transformer_auto_wrap_policy, transformer_layer_cls=layer_types
            ),
            device_mesh=mesh,
            device_id=self.device.current,
            mixed_precision=MixedPrecision(
                param_dtype=self.compute_dtype, reduce_dtype=torch.float32
            )
            if self.compute_dtype
            else None,
            use_orig_params=True,
        )

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Keeps gradients local, and unsharded, until the last microbatch."""
        assert isinstance(model, FullyShardedDataParallel)
        return nullcontext() if last else model.no_sync()

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clips with FSDP1's method, as its parameters are plain local shards."""
        assert isinstance(model, FullyShardedDataParallel)
        return model.clip_grad_norm_(max_norm)
