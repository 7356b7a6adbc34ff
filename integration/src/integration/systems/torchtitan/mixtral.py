"""Mixtral in TorchTitan's way: whole experts on each tensor parallel rank.

TorchTitan cuts experts within as well (expert tensor parallel). Hugging Face's have gate and up in
one parameter, of which a contiguous part is no part of each, so its other way is taken, that of
``expert_tensor_parallel_degree = 1``.
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
    """Cuts attention as LLaMA's, and divide experts.

    Args:
        model: a ``MixtralForCausalLM``; the size of ``mesh`` divides its number of experts.
        mesh: as in `parallelize_ends`.
        loss_parallel: as in `parallelize_ends`.
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
