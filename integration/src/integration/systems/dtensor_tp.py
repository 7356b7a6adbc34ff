"""Tensor parallelism of torch: parallelize_module with a plan per layer."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from integration.data import Modality
from integration.models import ModelShape
from integration.systems.base import System, require_divisible


def layer_plan(family: str, *, local_attention: bool) -> dict[str, ParallelStyle]:
    """Returns Megatron's column- and row-wise plan of one layer, as far as torch's styles go.

    Mixtral's experts are parameters of three dims, for which torch has no style: every rank
    computes all of them, and the router. A DiT's query, key and value are one matrix, whose column
    shards do not align with the three: its output is gathered, and every rank computes all heads.

    Args:
        family: family of the model.
        local_attention: whether attention runs on each rank's heads as plain tensors, which the
            fused CPU kernel needs; otherwise it runs on DTensors, so that dropout is one global
            operation.
    """
    if family == "dit":
        return {
            "attn.qkv": ColwiseParallel(output_layouts=Replicate()),
            "attn.proj": RowwiseParallel(input_layouts=Replicate()),
            "mlp.fc1": ColwiseParallel(),
            "mlp.fc2": RowwiseParallel(),
            "adaLN_modulation.1": ColwiseParallel(output_layouts=Replicate()),
        }
    attention: dict[str, ParallelStyle] = {
        "self_attn.q_proj": ColwiseParallel(use_local_output=local_attention),
        "self_attn.k_proj": ColwiseParallel(use_local_output=local_attention),
        "self_attn.v_proj": ColwiseParallel(use_local_output=local_attention),
        "self_attn.o_proj": RowwiseParallel(),
    }
    if family == "mixtral":
        return attention
    return attention | {
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }


# Fields of the models' shapes that the degree has to divide.
_DIVISIBLE = {
    "llama": ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"),
    "mixtral": ("num_attention_heads", "num_key_value_heads", "vocab_size"),
    "dit": ("hidden_size",),
}


class DTensorTensorParallel(System):
    """``torch.distributed.tensor.parallel`` on the modules that its styles support."""

    name = "dtensor-tp"
    accepts_meta_model = True
    families = tuple(_DIVISIBLE)

    def data_parallel_degree(self, world_size: int) -> int:
        """Returns 1, as every rank takes the global batch."""
        del world_size
        return 1

    def dist_rng_draws_dropout(self, shape: ModelShape) -> bool:
        """Returns True for decoders, whose attention is on DTensors; a DiT's is on local ones."""
        return shape.modality is Modality.TEXT

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Refuses a degree that does not divide heads, matrices or the vocabulary evenly."""
        for field in _DIVISIBLE[shape.family]:
            require_divisible(shape, field, world_size)

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Distributes the weights in place and installs the hooks."""
        mesh = init_device_mesh(self.device.type, (world_size,), mesh_dim_names=("tp",))
        for layer in shape.layers_of(model):
            plan = layer_plan(shape.family, local_attention=_is_fused(model))
            parallelize_module(layer, mesh, plan)
        if shape.modality is not Modality.TEXT:
            return model
        ends: dict[str, ParallelStyle] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        return parallelize_module(model, mesh, ends)

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Lets attention on DTensors take the model's plain tensors: cosines and masks."""
        del last
        return nullcontext() if _is_fused(model) else implicit_replication()


def _is_fused(model: nn.Module) -> bool:
    """Returns whether attention is on plain tensors; a DiT's always is."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "_attn_implementation", None) != "eager")
