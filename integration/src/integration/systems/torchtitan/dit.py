"""A diffusion transformer in TorchTitan's way: tokens are DTensors from first block to last.

A condition belongs to all tokens, so its gradient is a sum over the ranks, which the styles of
torch leave to DTensor alone: tensors in blocks stay DTensors but for attention. There each rank has
all heads: the model names their number where it reshapes its one projection of queries, keys and
values, and to cut it takes another model.
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
    """Cuts weights by columns and rows, and tokens between them.

    Args:
        model: a ``testkit.models.diffusion.DiffusionLoss``.
        mesh: the axis of tensor parallelism; its size divides the width of the model.
    """
    tokens, condition = Shard(1), Replicate()
    modulation = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    last: dict[str, ParallelStyle] = {
        "final_layer": PrepareModuleInputOutput(
            input_layouts=(tokens, condition),
            desired_input_layouts=(tokens, condition),
            output_layouts=tokens,
            desired_output_layouts=Replicate(),
        ),
        "final_layer.linear": SequenceParallel(),
        "final_layer.adaLN_modulation.1": modulation,
    }
    parallelize_module(model.get_submodule("model"), mesh, last)
    for index, block in enumerate(model.get_submodule("model.blocks").children()):
        given = PrepareModuleInput(
            input_layouts=(tokens if index else Replicate(), condition),
            desired_input_layouts=(tokens, condition),
        )
        parallelize_module(block, mesh, given)
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
