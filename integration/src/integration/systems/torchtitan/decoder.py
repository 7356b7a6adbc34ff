"""The common parts of Hugging Face's decoders: embedding, output layer, attention and norms.

They infer the number of heads with ``view``, as TorchTitan's models do, and compute positions from
unsharded embeddings, so that sequences are sharded at the input of the first layer.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def parallelize_ends(model: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Shards embedding and output layer along the vocabulary, and hidden states between them.

    Args:
        model: a ``LlamaForCausalLM`` or ``MixtralForCausalLM``.
        mesh: tensor parallel mesh, whose size divides the sequence length.
        loss_parallel: whether logits are DTensors sharded along the vocabulary.
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


def attention() -> dict[str, ParallelStyle]:
    """Returns the styles of a layer's attention and of both its norms."""
    return {
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
    }
