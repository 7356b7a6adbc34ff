"""Lightning's Trainer and Fabric with this package's `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import (  # type: ignore[import-not-found]  # an option of users
    ModelParallelStrategy,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp import api
from fsdp.integrations.versions import check_version
from fsdp.module import FSDPModule

__all__ = ["FullyShardStrategy", "parallelize_fn"]

# What Lightning calls instead of forward.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")

check_version("lightning")


def parallelize_fn(
    *classes: type[nn.Module], **options: Any
) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """Returns a ``parallelize_fn`` of Fabric's ModelParallelStrategy.

    It shards each module of the classes, then the model, on the mesh's axis ``"data_parallel"``. A
    model that is sharded stays as it is.

    Args:
        *classes: of modules that have a parameter group each, such as a model's blocks.
        **options: of `fully_shard`, but for its mesh.
    """

    def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if isinstance(model, FSDPModule):
            return model
        for module in reversed(list(model.modules())):  # inner ones first
            if module is not model and isinstance(module, classes):
                api.fully_shard(module, mesh=mesh["data_parallel"], **options)
        api.fully_shard(model, mesh=mesh["data_parallel"], **options)
        return model

    return shard


class FullyShardStrategy(ModelParallelStrategy):  # type: ignore[misc]  # of a module without types
    """Strategy of Lightning's Trainer that shards a LightningModule on all ranks.

    It is Lightning's ModelParallelStrategy with one axis, after whose ``configure_model``, if the
    module has one, it calls `fully_shard`: the module is not changed.

    Args:
        *classes: of modules that have a parameter group each; those of `parallelize_fn`.
        save_distributed_checkpoint: whether each rank writes its shards into a folder, as Lightning
            does by default, or rank 0 one file of whole tensors.
        **options: of `fully_shard`, but for its mesh.
    """

    def __init__(
        self,
        *classes: type[nn.Module],
        save_distributed_checkpoint: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1, save_distributed_checkpoint=save_distributed_checkpoint
        )
        self._shard = parallelize_fn(*classes, **options)

    def setup_environment(self) -> None:
        """Makes the mesh, and lets the module be sharded when it is configured."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        module, configure = self.lightning_module, self.lightning_module.configure_model

        def configure_model() -> None:
            configure()
            if not isinstance(module, FSDPModule):
                self._shard(module, self.device_mesh)
                for step in STEPS:
                    api.register_fsdp_forward_method(module, step)

        module.configure_model = configure_model
