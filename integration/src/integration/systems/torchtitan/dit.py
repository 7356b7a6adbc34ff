"""Parallelizes a diffusion transformer as TorchTitan does: tokens are DTensors in all blocks.

The condition is common to all tokens, so that its gradient is a sum over ranks, which only DTensor
computes and torch's styles do not: tensors in blocks are DTensors, except in attention. There each
rank computes all heads: the model contains their number where it reshapes its joint projection of
queries, keys and values, and sharding it requires a change to the model.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def apply_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards weights by columns and rows, and tokens between them.

    Args:
        model: a ``DiffusionLoss``.
        mesh: the axis of tensor parallelism; its size divides the width of the model.
    """
    tokens, condition = Shard(1), Replicate()
    modulation = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    final_layer: dict[str, ParallelStyle] = {
        "final_layer": PrepareModuleInputOutput(
            input_layouts=(tokens, condition),
            desired_input_layouts=(tokens, condition),
            output_layouts=tokens,
            desired_output_layouts=Replicate(),
        ),
        "final_layer.linear": SequenceParallel(),
        "final_layer.adaLN_modulation.1": modulation,
    }
    parallelize_module(model.get_submodule("model"), mesh, final_layer)
    for index, block in enumerate(model.get_submodule("model.blocks").children()):
        inputs = PrepareModuleInput(
            input_layouts=(tokens if index else Replicate(), condition),
            desired_input_layouts=(tokens, condition),
        )
        parallelize_module(block, mesh, inputs)
        plan: dict[str, ParallelStyle] = {
            "adaLN_modulation.1": modulation,
            "attn.qkv": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
            "attn.proj": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=tokens, use_local_output=False
            ),
            "mlp.fc1": ColwiseParallel(input_layouts=tokens),
            "mlp.fc2": RowwiseParallel(output_layouts=tokens, use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
