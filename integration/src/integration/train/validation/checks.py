"""Checks of options that depend on a system or a model, and the validated run."""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from integration.data import BatchPlan, Modality, vocabulary_of
from integration.device import Device, local_ranks, select_device
from integration.errors import UsageError
from integration.models import DiTShape, ModelShape, load_function, model_shape
from integration.systems import SYSTEM_NAMES, Degrees, System, get_system
from integration.systems.base import LayerPolicies
from integration.systems.divisors import alternatives
from integration.systems.plan import PlanSystem
from integration.train.config import (
    BLOCK_CAUSAL,
    DIST_RNG_RANDOM,
    NATIVE_RANDOM,
    TrainConfig,
    degrees_of,
    with_resolved_degrees,
)
from integration.train.launch.world import declared_world
from integration.train.measurement.profiling import StepRange
from integration.train.optimizers import ADAMW
from integration.train.validation.option_rules import DEFAULTS, RULES, plans_documents, spelled

# Dtypes of mixed precision by the value of --dtype.
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _check_join_timeout(config: TrainConfig) -> None:
    joins = "RANK" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if config.join_timeout != DEFAULTS["join_timeout"] and not joins:
        raise UsageError(
            f"--join-timeout {config.join_timeout:g}: expected ranks that join by RANK and"
            " MASTER_ADDR in the environment, got ranks that torchrun's agents have joined; leave"
            " it out, or give JOIN_TIMEOUT to integration/launch/torchrun.sh"
        )


@dataclass(frozen=True)
class ValidatedRun:
    """The validated options, system, model, batches and profile of a run.

    Attributes:
        config: its options, with all degrees as numbers of ranks.
    """

    config: TrainConfig
    system: System
    shape: ModelShape
    batch_plan: BatchPlan
    profile_steps: StepRange | None


def validate(config: TrainConfig, world_size: int | None = None) -> ValidatedRun:
    """Refuses incompatible options and options without effect; creates no process, file or model.

    An option with its default value counts as not given. Paths are validated by `prepare`, which
    calls this first. The command calls it before it starts ranks.

    Args:
        config: all options of a run.
        world_size: number of ranks; by default ``ranks`` or, without them, the number of ranks in
            the environment.

    Raises:
        UsageError: names the options, the expected values and the remedy.
    """
    if world_size is None:
        world_size = config.ranks or declared_world().size
    config = with_resolved_degrees(config, world_size)
    device = select_device(config.device, local_ranks(config.ranks))
    system = _supported_system(config, device)
    shape = model_shape(config.model)
    if shape.modality is Modality.TEXT:
        shape = shape.with_vocabulary(vocabulary_of(config.tokenizer))
    if system.families is not None and shape.family not in system.families:
        raise UsageError(
            f"system {system.name!r} has no plan for model {config.model!r}; give another --system"
            " or --model"
        )
    for rule in RULES:
        rule.check(config)
    system.has_documents = config.attn_mask_type == BLOCK_CAUSAL
    if isinstance(system, PlanSystem) and config.plan is not None:
        system.make_plan = load_function("--plan", config.plan)
    _check_join_timeout(config)
    if not system.supports_checkpoints:
        _require_plain(config)
    if config.pp_degree > 1:
        # Imported where there is a pipeline: torch's pipelining imports torch.compile's tracer.
        from integration.pipeline.system import with_pipeline

        system = with_pipeline(system, shape, config, world_size)
    system.check(world_size, shape)
    _check_router_loss(config, shape)
    _check_router_options(config, shape)
    _check_samples(config, system, shape)
    _check_initial(config, system, shape)
    _check_optimizer(config, system)
    _check_random(config, system, shape)
    if config.warmup_steps + config.decay_steps > config.steps:
        raise UsageError(
            f"--warmup-steps {config.warmup_steps} and --decay-steps {config.decay_steps}: expected"
            f" a sum of at most --steps, {config.steps}; give more --steps, or fewer of the others"
        )
    plan = BatchPlan(
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        degree=system.data_parallel_degree(world_size),
    )
    steps = StepRange.parse(config.profile_steps) if config.profile_steps else None
    return ValidatedRun(config, system, shape, plan, steps)


def _check_router_loss(config: TrainConfig, shape: ModelShape) -> None:
    if not shape.has_router_loss:
        return
    got = f"--model {config.model} with output_router_logits = true, a loss of all tokens' routers"
    if config.system not in ("single", "plan"):
        raise UsageError(
            f"{got}: expected --system plan, or single, got {config.system}, under which a rank"
            " computes that of its own tokens; set it to false, or use --system plan"
        )
    if config.compile != "none":
        raise UsageError(
            f"{got}: expected --compile none, got {config.compile}, as routers are inside of"
            " compiled layers; leave it out, or set output_router_logits to false"
        )


# Systems whose gradients are the mean over all tokens of a microbatch, of which routers have some.
_ROUTER_SYSTEMS = ("single", "ddp", "fsdp2", "fsdp", "plan")


def _check_router_options(config: TrainConfig, shape: ModelShape) -> None:
    """Refuses options of routers where they would have no effect."""
    for field in ("router_z_loss", "capacity_factor", "expert_bias_rate"):
        if getattr(config, field) == DEFAULTS[field]:
            continue
        got = spelled(config, field)
        if not shape.has_routers:
            raise UsageError(
                f"{got}: expected a model with routers, such as mixtral-tiny, got --model"
                f" {config.model}; leave it out"
            )
        if config.system not in _ROUTER_SYSTEMS:
            raise UsageError(
                f"{got}: expected one of the systems {', '.join(_ROUTER_SYSTEMS)}, got"
                f" {config.system}; use one of them, or leave it out"
            )
        if config.compile != "none":
            raise UsageError(
                f"{got}: expected --compile none, got {config.compile}, as routers are inside of"
                " compiled layers; leave either out"
            )
        if field == "expert_bias_rate":
            if not shape.has_expert_biases:
                raise UsageError(
                    f"{got}: expected a model whose routers have e_score_correction_bias, such as"
                    f" deepseek-v3-tiny, got --model {config.model}; leave it out"
                )
        elif importlib.util.find_spec("plan_api") is None:
            raise UsageError(
                f"{got} needs the package plan-api, which is not installed; install it, or leave"
                " the option out"
            )


def _supported_system(config: TrainConfig, device: Device) -> System:
    """Returns the system of a run, with every training feature that the run uses.

    Raises:
        UsageError: there is no such system, or it supports neither the compiler nor the dtype.
    """
    system = get_system(config.system, degrees_of(config), device=device)
    if config.compile != "none" and not system.supports_compile:
        fit = [name for name in SYSTEM_NAMES if get_system(name).supports_compile]
        raise _unsupported(config, f"--compile {config.compile}", "--compile none", fit)
    # Inductor compiles with Triton on GPUs, and with this compiler on CPUs.
    if config.compile == "inductor" and shutil.which("g++") is None:
        raise UsageError(
            "--compile inductor needs the compiler g++, which is not installed;"
            " install it, or use --compile aot_eager"
        )
    if config.offload and not device.is_accelerator:
        raise UsageError(
            "--offload: expected an accelerator, whose memory it saves, got --device"
            f" {device.type}, where parameters are on the host already; leave it out"
        )
    policies = LayerPolicies(
        config.activation_checkpointing, config.activation_checkpointing_every, config.compile,
        config.precision, config.precision_exclude,
    )  # fmt: skip
    if config.attn_mask_type == BLOCK_CAUSAL and not system.supports_documents:
        fit = [name for name in SYSTEM_NAMES if get_system(name).supports_documents]
        option = f"--attn-mask-type {BLOCK_CAUSAL}"
        raise _unsupported(config, option, "--attn-mask-type causal", fit)
    if config.precision != "none" and not system.supports_precision:
        fit = [name for name in SYSTEM_NAMES if get_system(name).supports_precision]
        raise _unsupported(config, f"--precision {config.precision}", "--precision none", fit)
    if config.dtype == "fp32":
        system.layer_policies = policies
        return system
    dtype = COMPUTE_DTYPES[config.dtype]
    if dtype not in system.compute_dtypes:
        fit = [name for name in SYSTEM_NAMES if dtype in get_system(name).compute_dtypes]
        raise _unsupported(config, f"--dtype {config.dtype}", "--dtype fp32", fit)
    system = get_system(config.system, degrees_of(config), dtype, device)
    system.layer_policies = policies
    return system


def _unsupported(config: TrainConfig, option: str, default: str, fit: Sequence[str]) -> UsageError:
    return UsageError(
        f"system {config.system!r} does not support {option}; use {default}, or one of the systems"
        f" {', '.join(fit)}"
    )


def _require_plain(config: TrainConfig) -> None:
    """Refuses options that need weights and gradients that a system does not give access to."""
    options = {
        "--pp-degree": config.pp_degree > 1,
        "--init-from": config.init_from is not None,
        "--fingerprint": config.fingerprint,
        "--eval-samples": config.eval_samples > 0,
        "--clip-grad-norm": config.clip_grad_norm is not None,
        "--checkpoint-every": config.checkpoint_every > 0,
    }
    for option, is_given in options.items():
        if is_given:
            raise UsageError(
                f"system {config.system!r} does not take {option}; leave it out, or use --system"
                " fsdp2"
            )
    # The default is refused too, as the run would silently save no weights.
    if config.final_checkpoint:
        raise UsageError(
            f"system {config.system!r}: expected --no-final-checkpoint, as it saves no weights, got"
            " --final-checkpoint, the default; give --no-final-checkpoint, or use --system fsdp2"
        )


def _check_samples(config: TrainConfig, system: System, shape: ModelShape) -> None:
    """Refuses lengths and numbers of samples that the ranks cannot share."""
    _check_length(config, system, shape)
    _check_length_of_overlap(config, shape)
    if shape.modality is Modality.TEXT and config.dropout > 0 and system.name.startswith("plan"):
        _check_samples_of_attention(config, system.degrees)


def _check_length(config: TrainConfig, system: System, shape: ModelShape) -> None:
    if shape.modality is not Modality.TEXT:
        return
    length = config.sequence_length
    chunks, parts = (1, "an equal part") if config.cp_method == "ulysses" else (2, "two chunks")
    # Within the mask of a batch, whose documents are of any length, plans pad sequences, but not
    # those that stages send.
    pads = plans_documents(config) and config.pp_degree == 1
    if config.cp > 1 and not pads and length % (chunks * config.cp):
        fit = [each for each in system.degrees.fitting("cp") if length % (chunks * each) == 0]
        raise UsageError(
            f"--cp {config.cp}: expected --sequence-length to be a multiple of"
            f" {chunks * config.cp}, as each rank has {parts} of a sequence, got {length};"
            f" --cp {alternatives(fit or [1])} would fit, or --sequence-length"
            f" {_multiples_around(length, chunks * config.cp)}"
        )
    if system.needs_even_sequences and length % config.tp:
        raise UsageError(
            f"system {system.name!r}: expected --sequence-length to be a multiple of --tp"
            f" {config.tp}, which shards sequences evenly, got {length}; --sequence-length"
            f" {_multiples_around(length, config.tp)} would fit"
        )


def _check_length_of_overlap(config: TrainConfig, shape: ModelShape) -> None:
    """Refuses sequences that ranks shard unevenly, which are sent without a product beside them."""
    if config.overlap is None or not config.sp:
        return
    ranks = config.cp * config.tp
    name, length = "--sequence-length", config.sequence_length
    remedy = f"{name} {_multiples_around(length, ranks)} would fit"
    if isinstance(shape, DiTShape):
        name, length = "the model's number of patches", shape.patches
        remedy = "leave --overlap out, or give another --tp"
    if length % ranks:
        raise UsageError(
            f"--overlap {config.overlap}: expected {name} to be a multiple of {ranks}, --cp x --tp,"
            " as sequences that are sharded unevenly are sent without a product beside them, got"
            f" {length}; {remedy}"
        )


def _check_samples_of_attention(config: TrainConfig, degrees: Degrees) -> None:
    """Refuses samples that DTensor does not view as (samples, heads) once both were one dim.

    With dropout, attention multiplies matrices of samples and heads, which are sharded along the
    data parallel axis and ``tp``. Of their product torch asks that ``tp`` divides the samples, too
    (torch/distributed/tensor/_ops/_view_ops.py, _find_shard_for_split).
    """
    parts = 1
    if config.pp_degree > 1:
        parts = config.pp_microbatches or config.micro_batch
    samples = config.micro_batch // parts * degrees.data
    if degrees.data > 1 and samples % degrees.tp:
        fit = [each for each in degrees.fitting("tp") if samples % each == 0]
        raise UsageError(
            f"--dropout {config.dropout:g}: expected --tp {degrees.tp} to divide the {samples}"
            " samples of a microbatch on all data parallel ranks, which attention on DTensors"
            f" multiplies with sharded heads, got a remainder; --tp {alternatives(fit)} would fit,"
            " or another --micro-batch"
        )


def _multiples_around(number: int, factor: int) -> str:
    """Returns the positive multiples of ``factor`` next to ``number``, as a clause."""
    below = number // factor * factor
    return alternatives([each for each in (below, below + factor) if each > 0])


def _check_initial(config: TrainConfig, system: System, shape: ModelShape) -> None:
    if config.init == "whole" or system.accepts_deferred_init:
        return
    if not system.accepts_meta_model:
        raise UsageError(
            f"system {system.name!r}: expected --init whole, as it shards existing weights, got"
            f" --init {config.init}; use --init whole"
        )
    if system.needs_dist_rng_for_init and config.random != DIST_RNG_RANDOM:
        raise UsageError(
            f"system {system.name!r} with --init sharded: expected --random dist-rng, as torch"
            f" draws other weights on its shards, got --random {config.random}; use --random"
            " dist-rng, or --init whole"
        )
    if not shape.can_reinitialize:
        raise UsageError(
            f"model {config.model!r} with system {system.name!r}: expected --init whole, as the"
            " model's initialiser cannot draw on shards, got --init sharded; use --init whole, or"
            " --system plan"
        )


def _check_optimizer(config: TrainConfig, system: System) -> None:
    if config.optimizer == ADAMW:
        return
    if not system.supports_all_optimizers:
        fit = [name for name in SYSTEM_NAMES if get_system(name).supports_all_optimizers]
        raise UsageError(
            f"system {system.name!r}: expected --optimizer adamw, got {config.optimizer}, which"
            f" needs one of: {', '.join(fit)}; use one of them"
        )
    if importlib.util.find_spec("fsdp") is None:
        raise UsageError(
            f"--optimizer {config.optimizer} needs the package fsdp, which is not installed;"
            " install it, or use --optimizer adamw"
        )


def _check_random_of_context(config: TrainConfig, system: System) -> None:
    """Refuses dropout of attention by masks' parts where one device's masks cannot be drawn."""
    other = f"--cp {config.cp}" if config.cp > 1 else spelled(config, "attn_mask_type")
    if system.device.is_accelerator:
        raise UsageError(
            f"--dropout {config.dropout:g}: expected --device cpu with {other}, whose"
            " ranks draw one device's masks of attention weights there only, got --device"
            f" {system.device.type}; leave either out"
        )
    if importlib.util.find_spec("dist_rng") is None:
        raise UsageError(
            f"--dropout {config.dropout:g} with {other} needs the package dist-rng, which"
            " is not installed; install it, or leave either out"
        )


def _check_random(config: TrainConfig, system: System, shape: ModelShape) -> None:
    draws_in_parts = config.cp > 1 or plans_documents(config)
    if draws_in_parts and config.dropout > 0 and shape.modality is Modality.TEXT:
        _check_random_of_context(config, system)
    if config.random != DIST_RNG_RANDOM:
        return
    if importlib.util.find_spec("dist_rng") is None:
        raise UsageError(
            "--random dist-rng needs the package dist-rng, which is not installed; install it, or"
            f" use --random {NATIVE_RANDOM}"
        )
    draws_weights = config.init == "sharded" and system.init_on_dtensors
    drops_out = config.dropout > 0 and system.dist_rng_draws_dropout(shape)
    if not (draws_weights or drops_out):
        raise UsageError(
            f"--random dist-rng: expected random numbers for DTensors, of which system"
            f" {system.name!r} draws none with {spelled(config, 'init')} and"
            f" {spelled(config, 'dropout')}; leave --random out, or use --init sharded, or"
            " --dropout, with a system that shards what they draw"
        )
