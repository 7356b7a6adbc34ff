"""A module for torchtitan, out of its tree: its LLaMA 3 with a plan, fsdp and fsdp's optimizers.

``torchrun ... -m torchtitan.train --module fsdp_titan --config muon`` trains it, with this folder
in PYTHONPATH. `parallelize_llama` is a model's ``parallelize_fn``, `Optimizers` a container of
optimizers, and the other functions are torchtitan's debug model with each of them.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Partial, Replicate, Shard
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import fsdp
from fsdp import optim
from fsdp.integrations import check_version
from plan_api import Plan, parallelize

check_version("torchtitan")
# Parameters that matrix optimizers leave to AdamW.
NOT_MATRICES = r"norm|tok_embeddings|lm_head"


def tensor_parallel(mesh: DeviceMesh) -> Plan:
    """Returns a plan of torchtitan's LLaMA 3 on the axis ``"tp"``, with a loss on sharded logits.

    Layers may be within the modules of activation checkpointing, whose names are skipped.
    """
    whole, part, layer = Replicate(), Partial(), r"layers\.\d+(\._checkpoint_wrapped_module)?"
    # The embedding computes with local tensors.
    plan = Plan(mesh).shard(r"layers\.0.<in>", whole, "tp")
    plan.shard(r"layers\.\d+.<in:positions>", whole, "tp")
    columns, rows = (
        r"attention\.qkv_linear\.wqkv|feed_forward\.w[13]",
        r"attention\.wo|feed_forward\.w2",
    )
    plan.shard(rf"{layer}\.({columns})\.weight", Shard(0), "tp")
    plan.shard(rf"{layer}\.({rows})\.weight", Shard(1), "tp")
    for inner in ("attention", "feed_forward"):
        at = rf"{layer}\.{inner}"
        plan.redistribute(f"{at}.<in>", whole, whole, "tp", grad_src=part, grad_dst=whole)
        plan.redistribute(f"{at}.<out>", part, whole, "tp")
    plan.shard(r"lm_head\.weight", Shard(0), "tp")
    plan.redistribute("lm_head.<in>", whole, whole, "tp", grad_src=part, grad_dst=whole)
    return plan


def parallelize_llama(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Parallelizes the model, which is on meta; torchtitan then materializes its shards.

    Raises:
        ValueError: an option of torchtitan that this function does not implement.
    """
    _check_options(parallel_dims, training, parallelism, compile_config)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if parallel_dims.tp_enabled:
        parallelize(model, tensor_parallel(parallel_dims.get_mesh("tp")))
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    policy = parallelism.fsdp_reshard_after_forward
    shard = functools.partial(
        fsdp.fully_shard,
        mesh=parallel_dims.get_mesh(axes),
        mp_policy=fsdp.MixedPrecisionPolicy(
            TORCH_DTYPE_MAP[training.mixed_precision_param],
            TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        offload_policy=CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy(),
        # Rank boundaries do not split what the optimizers below quantize together.
        shard_placement_fn=lambda param: fsdp.Block(256),
    )
    shard(model.tok_embeddings, reshard_after_forward=policy != "never")
    shard([model.norm, model.lm_head], reshard_after_forward=policy == "always")
    for layer in model.layers.values():
        shard(layer, reshard_after_forward=policy != "never")
    shard(model)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)  # torchtitan divides by the number of tokens
    return model


def _check_options(
    parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any
) -> None:
    refused = {
        "parallelism.spmd_backend": (parallelism.spmd_backend, "partial_dtensor"),
        "parallelism.context_parallel_degree": (parallel_dims.cp, 1),
        "parallelism.pipeline_parallel_degree": (parallel_dims.pp, 1),
        "parallelism.expert_parallel_degree": (parallel_dims.ep, 1),
        "parallelism.enable_fsdp_symm_mem": (parallelism.enable_fsdp_symm_mem, False),
        "compile.enable": (compile_config.enable, False),
        "training.disable_cuda_graphs": (training.disable_cuda_graphs, True),
    }
    if parallel_dims.tp_enabled:
        refused["parallelism.enable_sequence_parallel"] = (
            parallelism.enable_sequence_parallel,
            False,
        )
    for option, (got, expected) in refused.items():
        if got != expected:
            raise ValueError(
                f"fsdp_titan: expected {option} to be {expected!r}, got {got!r}; set it, or use "
                f"torchtitan's own parallelize_fn"
            )


class Optimizers(OptimizersContainer):
    """torchtitan's container with fsdp's optimizers, by the names of their classes."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Options of the container; fsdp's optimizers have one implementation."""

        implementation: str = "for-loop"

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        own = {"Adam8bit": optim.Adam8bit, "Muon": optim.Muon, "SOAP": optim.SOAP}
        return own.get(name) or OptimizersContainer._resolve_optimizer_factory(name)

    @staticmethod
    def _build_impl_kwargs(config: OptimizersContainer.Config) -> dict[str, Any]:
        if config.implementation != "for-loop":
            raise ValueError(
                f"fsdp_titan: expected optimizer.implementation to be 'for-loop', got "
                f"{config.implementation!r}; pass foreach or fused in optimizer_kwargs of AdamW"
            )
        return {}


def adamw() -> Trainer.Config:
    """Returns torchtitan's debug model with its own AdamW, sharded by `parallelize_llama`."""
    config = llama3_debugmodel()
    config.model_spec.parallelize_fn = parallelize_llama
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.enable_sequence_parallel = False
    config.training.disable_cuda_graphs = True
    return config


def adam8bit() -> Trainer.Config:
    """Returns the debug model with 8-bit Adam for all parameters."""
    return _with_optimizers(
        ParamGroupConfig(
            pattern=".*",
            optimizer_name="Adam8bit",
            optimizer_kwargs={"lr": 8e-4, "weight_decay": 0.1},
        )
    )


def muon() -> Trainer.Config:
    """Returns the debug model with Muon for the matrices of its layers, and AdamW for the rest."""
    return _with_matrix_optimizer("Muon", {"lr": 2e-3, "adjust_lr_fn": "match_rms_adamw"})


def soap() -> Trainer.Config:
    """Returns the debug model with SOAP for the matrices of its layers, and AdamW for the rest."""
    return _with_matrix_optimizer("SOAP", {"lr": 8e-4, "precondition_frequency": 2})


def _with_matrix_optimizer(name: str, options: dict[str, Any]) -> Trainer.Config:
    """Returns the debug model with an optimizer, whose ``use_...`` option off is AdamW.

    Args:
        name: of its class.
        options: of the group of matrices.
    """
    others = {"lr": 8e-4, f"use_{name.lower()}": False}
    return _with_optimizers(
        ParamGroupConfig(pattern=NOT_MATRICES, optimizer_name=name, optimizer_kwargs=others),
        ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs=options),
    )


def _with_optimizers(*groups: ParamGroupConfig) -> Trainer.Config:
    config = adamw()
    config.optimizer = Optimizers.Config(param_groups=list(groups))
    return config
