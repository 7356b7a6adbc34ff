"""Parallelizes LLaMA as TorchTitan does: attention and MLPs by columns and rows."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from integration.systems.torchtitan.decoder import attention, parallelize_ends


def apply_tp(model: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool = False) -> None:
    """Shards weights by columns and rows, and hidden states between them along the sequence.

    Args:
        model: a ``LlamaForCausalLM``.
        mesh: see `parallelize_ends`.
        loss_parallel: see `parallelize_ends`.
    """
    parallelize_ends(model, mesh, loss_parallel=loss_parallel)
    for layer in model.get_submodule("model.layers").children():
        mlp: dict[str, ParallelStyle] = {
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, attention() | mlp)
