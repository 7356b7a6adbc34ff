"""Parallelizes Mixtral as TorchTitan does: each tensor parallel rank has some of the experts.

TorchTitan can also shard within experts (expert tensor parallel). Hugging Face's model has gate and
up projection in one parameter, whose contiguous shards do not shard both; therefore this is
TorchTitan's ``expert_tensor_parallel_degree = 1``.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInputOutput,
    parallelize_module,
)

from integration.systems.torchtitan.decoder import attention, parallelize_ends
from integration.systems.torchtitan.styles import ExpertSharding, NoParallel


def apply_tp(model: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool = False) -> None:
    """Shards attention as in LLaMA, and the experts.

    Args:
        model: a ``MixtralForCausalLM``; the size of ``mesh`` divides its number of experts.
        mesh: see `parallelize_ends`.
        loss_parallel: see `parallelize_ends`.
    """
    parallelize_ends(model, mesh, loss_parallel=loss_parallel)
    for layer in model.get_submodule("model.layers").children():
        experts: dict[str, ParallelStyle] = {
            "mlp": PrepareModuleInputOutput(
                input_layouts=Shard(1),
                desired_input_layouts=Replicate(),
                output_layouts=Partial(),
                desired_output_layouts=Shard(1),
            ),
            "mlp.gate": NoParallel(),
            "mlp.experts": ExpertSharding(),
        }
        parallelize_module(layer, mesh, attention() | experts)
