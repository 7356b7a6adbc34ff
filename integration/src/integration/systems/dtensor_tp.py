"""Tensor parallelism as stock torch does it: parallelize_module with a plan per layer."""

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

from integration.models import ModelShape
from integration.systems.base import System, require_divisible


def layer_plan(*, local_attention: bool) -> dict[str, ParallelStyle]:
    """Return the Megatron cut of one LLaMA layer: columns in, rows out, one reduction each.

    Args:
        local_attention: attention runs on each rank's heads as plain tensors, which the fused
            CPU kernel needs; otherwise on DTensors, so that dropout is one global operation.
    """
    return {
        "self_attn.q_proj": ColwiseParallel(use_local_output=local_attention),
        "self_attn.k_proj": ColwiseParallel(use_local_output=local_attention),
        "self_attn.v_proj": ColwiseParallel(use_local_output=local_attention),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }


class DTensorTensorParallel(System):
    """``torch.distributed.tensor.parallel`` on attention, MLP, embedding and output."""

    name = "dtensor-tp"
    takes_meta = True
    families = ("llama",)

    def data_parallel_degree(self, world_size: int) -> int:
        """Return 1: every rank sees the whole batch."""
        del world_size
        return 1

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Refuse a degree that cuts a head, the MLP or the vocabulary unevenly."""
        for field in (
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
        ):
            require_divisible(shape, field, world_size)

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Distribute the weights in place and install the hooks."""
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        for layer in shape.layers_of(model):
            parallelize_module(layer, mesh, layer_plan(local_attention=_is_fused(model)))
        ends: dict[str, ParallelStyle] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        return parallelize_module(model, mesh, ends)

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Let attention on DTensors meet the model's own plain tensors: cosines and masks."""
        del last
        return nullcontext() if _is_fused(model) else implicit_replication()


def _is_fused(model: nn.Module) -> bool:
    return bool(model.config._attn_implementation != "eager")  # type: ignore[union-attr]
