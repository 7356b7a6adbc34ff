"""LLaMA in TorchTitan's way, as its users write it for each model: styles of stock torch by path.

After the plan of pytorch/torchtitan's models/llama3/infra/parallelize.py. The model is Hugging
Face's, unmodified: it leaves the number of heads to ``view``, as TorchTitan's own does, and makes
positions of embeddings that are whole, so sequences are cut where the first layer begins.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def apply_tp(model: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Cut weights by columns and rows, and hidden states between them along the sequence.

    Args:
        model: a ``LlamaForCausalLM``.
        mesh: the axis of tensor parallelism; its size divides the length of sequences.
        loss_parallel: logits stay cut along the vocabulary, as DTensors.
    """
    ends: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.0": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    parallelize_module(model, mesh, ends)
    for layer in model.get_submodule("model.layers").children():
        plan: dict[str, ParallelStyle] = {
            "input_layernorm": SequenceParallel(use_local_output=True),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "post_attention_layernorm": SequenceParallel(use_local_output=True),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)


def apply_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share parameters: a group for each layer, and one for embedding, norm and output.

    TorchTitan has groups for those three as well. An embedding that `apply_tp` has cut returns a
    view, of which FSDP2 warns where it ends a group.

    Args:
        model: a ``LlamaForCausalLM``, after `apply_tp` where there is one.
        mesh: one axis, or one of copies and one of parts (HSDP).
    """
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
