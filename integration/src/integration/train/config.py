"""The options of a run, parsed from the command line and from TOML."""

import argparse
import re
import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from integration.data import BYTES
from integration.device import DeviceOption
from integration.errors import UsageError
from integration.models import RouterOptions
from integration.systems import REST, Degrees, Placements, SendDtype, get_system
from integration.systems.base import Backend, Precision, Recompute
from integration.systems.degrees import context_method

AUTO_RESUME = "auto"
NEVER_RESUME = "never"
# Values of --random.
NATIVE_RANDOM: Literal["stock"] = "stock"
DIST_RNG_RANDOM: Literal["dist-rng"] = "dist-rng"
# Of --attn-mask-type, attention within documents.
BLOCK_CAUSAL: Literal["block-causal"] = "block-causal"
# The output layer, of all families of models.
EXCLUDED_FROM_PRECISION = r"(.*\.)?lm_head"

_PROGRAM = "python -m integration.train"
_DESCRIPTION = """Train a model and write a run folder: metrics.jsonl, summary.json, checkpoints.

--config FILE.toml reads the same options from a file (keys with underscores); the command line
overrides it. Start it directly, with --ranks N, or under torchrun."""

Positive = Annotated[int, Field(ge=1)]


def _positive_or_rest(number: int) -> int:
    if number < 1 and number != REST:
        raise ValueError(f"expected at least 1, or {REST}, which takes the rest of the ranks")
    return number


def regular_expression(pattern: str) -> str:
    """Refuses a pattern with an error, as a ValueError."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"expected a regular expression, got one with an error: {error}") from None
    return pattern


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrainConfig:
    """The options of one run."""

    system: str = "single"
    """System: single, ddp, fsdp1, fsdp2, fsdp, deepspeed, dtensor-tp; or, with the degrees below,
    plan or torchtitan-style."""
    model: str = "llama-10m"
    """Model: llama-10m, llama-3m, llama-tiny, llama-tied-tiny, mixtral-10m, mixtral-tiny,
    qwen3-tiny, gemma3-tiny, qwen3-moe-tiny, gpt-oss-tiny, deepseek-v3-tiny, dit-3m, dit-small or
    dit-tiny; the path of a Hugging Face config.json of one of their families; or
    package.module:function, which returns an integration.models.ModelShape."""
    plan: str | None = None
    """plan: package.module:function, which is called with the mesh, the model's shape and the
    degrees, and returns a plan_api.Plan; by default the model's plan of the zoo."""
    dp_replicate: Positive = 1
    """plan: data parallel degree with replicated parameters."""
    dp_shard: Annotated[int, AfterValidator(_positive_or_rest)] = 1
    """plan: data parallel degree with sharded parameters (FSDP); HSDP with --dp-replicate; -1: the
    ranks that the other degrees leave."""
    ep: Positive = 1
    """plan: expert parallel degree of models with experts: a divisor of --dp-shard, or equal to
    --tp."""
    ep_chunks: Positive = 1
    """plan: parts in which a rank sends its tokens to experts, while others are computed: more hide
    more of the network's time, and take more processor time."""
    cp: Positive = 1
    """plan: context parallel degree; --dp-shard of at least 2 shards parameters over its ranks,
    too."""
    cp_method: Annotated[str, AfterValidator(context_method)] = "ring"
    """plan: context parallel attention: ring, all-gather, ulysses, or ulysses-ring:N: ulysses among
    N consecutive ranks, as those of a host, and a ring across."""
    tp: Positive = 1
    """plan: tensor parallel degree."""
    sp: bool = False
    """plan: sequence parallelism: shard hidden states between attention and MLP, by --tp."""
    loss_parallel: bool = False
    """plan: shard logits along the vocabulary, by --tp, up to the loss."""
    zero3: bool = False
    """plan: shard parameters along --dp-shard by phases of the plan instead of the package fsdp."""
    placements: Placements | None = None
    """fsdp, and plan with --dp-shard: placements of parameters, gradients and optimizer state: ddp,
    zero1, zero2 or zero3; hsdp or hfsdp with --dp-replicate; by default zero3 or hsdp."""
    offload: bool = False
    """fsdp, fsdp2, and plan with --dp-shard: keep sharded parameters, gradients and optimizer state
    on the host; with an accelerator."""
    send_dtype: SendDtype | None = None
    """fsdp, and plan with --dp-shard: dtype in which ranks send the terms of gradients, which are
    added in fp32: bfloat16, or float8 (e4m3, with a scale for 128 numbers); by default fp32."""
    overlap: Literal["tp"] | None = None
    """plan: tp sends activations of --tp while linear layers multiply others (asynchronous tensor
    parallelism), best with --sp."""
    static: bool = False
    """plan: run operators on local tensors, by plan-api's static mode."""
    pp_degree: Positive = 1
    """Pipeline parallel degree; the system parallelizes each stage over the other ranks."""
    pp_split_points: str | None = None
    """First module of each stage but the first, separated by commas; by default even stages."""
    pp_schedule: str = "1F1B"
    """GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV."""
    pp_microbatches: Positive | None = None
    """Microbatches of the pipeline per --micro-batch; by default one per sample."""
    data: Path | None = None
    """File or folder of text; by default the Python standard library's sources. Not for DiT."""
    out: Path = Path("runs/latest")
    """Run folder to write."""
    steps: Positive = 100
    """Optimizer steps in total, including those before a resume."""
    global_batch: Positive = 8
    """Samples per optimizer step: micro batch x accumulation x data-parallel degree."""
    micro_batch: Positive = 4
    """Samples of a microbatch on one rank."""
    sequence_length: Positive = 64
    """Tokens per sample of text."""
    attn_mask_type: Literal["causal", "block-causal"] = "causal"
    """What a token attends to: the tokens of its sample before it; or those of its document
    (block-causal, as TorchTitan's block_causal and Megatron-LM's --reset-attention-mask), where
    positions restart (under plan they go on, which rotary embeddings do not show)."""
    tokenizer: str = BYTES
    """Tokenizer of text: bytes; bpe:N, a byte-level BPE of N tokens that is trained on the data; or
    a tokenizer.json of the library tokenizers."""
    optimizer: Literal["adamw", "adam8bit", "muon", "soap"] = "adamw"
    """torch's fused AdamW; fsdp's AdamW with 8-bit moments; or fsdp's Muon or SOAP for the matrices
    of the layers, and AdamW otherwise."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up of the learning rate."""
    schedule: Literal["linear", "cosine"] = "linear"
    """Learning rate after warm-up: constant, then linear over --decay-steps; or a cosine over all
    steps, from --learning-rate to --min-learning-rate."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """Last steps, with linear decay of the learning rate towards 0."""
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate of the last step of a cosine."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip gradients to this total norm."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the weights and of the order of the data."""
    init: Literal["whole", "sharded"] = "whole"
    """whole: every rank draws all weights, then shards them; sharded: it draws its shards only."""
    init_from: Path | None = None
    """Folder of safetensors, as written by save_pretrained, with the initial weights."""
    router_z_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Coefficient of the z-loss of routers, which is added to the loss of training; 0: none."""
    capacity_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """In training an expert takes the first ceil(capacity factor x tokens x choices / experts) of
    the tokens of each sequence that chose it, and drops others; by default it takes all."""
    expert_bias_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """DeepSeek-V3: by how much an expert's bias in the choice of experts moves after each step, up
    if it got fewer tokens than the mean, down if more; 0: biases stay as they are."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability, of attention weights, or of DiT's linear layers."""
    random: Literal["stock", "dist-rng"] = NATIVE_RANDOM
    """Implementation that draws random DTensors: torch's, or dist-rng's, as on one device."""
    fingerprint: bool = False
    """Write hashes of the initial weights and the first step's dropout masks into the summary."""
    activation_checkpointing: Recompute = "none"
    """What backward recomputes: nothing, each layer (full), all but matrix products and attention
    (selective-op), some layers (selective-layer), or, under plan with --ep, each layer without
    sending tokens to experts again (keep-dispatch)."""
    activation_checkpointing_every: Positive = 2
    """selective-layer recomputes one of this many layers."""
    compile: Backend = "none"
    """Backend of torch.compile for each layer."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of compute; weights and gradient reductions are fp32. fp16 scales the loss."""
    precision: Precision = "none"
    """single and plan: recipe of plan-api by which linear layers and experts quantize the operands
    of their matrix products; weights and optimizer state stay fp32."""
    precision_exclude: Annotated[str, AfterValidator(regular_expression)] = EXCLUDED_FROM_PRECISION
    """Pattern of the names of linear layers and experts that do not; by default the output
    layer."""
    eval_samples: Annotated[int, Field(ge=0)] = 0
    """Samples that are held out from training, and evaluated after the last step: a multiple of
    --global-batch."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations of --eval-samples; 0 evaluates after the last step only."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0 saves only at the end and on SIGTERM."""
    checkpoint_async: bool = False
    """Write the checkpoints of --checkpoint-every in the background, from a copy of the state."""
    final_checkpoint: bool = True
    """Write a checkpoint of the last step."""
    keep_checkpoints: Annotated[int, Field(ge=0)] = 0
    """Number of newest complete checkpoints to keep; 0 keeps all."""
    resume: str = AUTO_RESUME
    """auto (newest complete checkpoint of the run folder), never, or a checkpoint folder."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    profile_steps: str | None = None
    """Steps to profile, such as 10:13, inclusive; traces are in the run folder's profile/."""
    count_collectives: Positive | None = None
    """Step whose collectives are counted in summary.json; it is slower than others."""
    peak_flops: Annotated[float, Field(gt=0)] | None = None
    """Peak FLOP/s of a rank, for MFU; by default known by the GPU's name, or measured."""
    device: DeviceOption = "auto"
    """auto (the machine's accelerator, or the CPU), cpu, cuda, or sim, which is testkit's simulated
    accelerator."""
    ranks: Positive | None = None
    """Number of ranks to start on this machine; leave it out under torchrun, which starts those of
    several hosts."""
    threads: Positive = 1
    """CPU threads per rank."""
    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Timeout of collectives, in seconds."""
    join_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds to wait for other ranks at the start, where another launcher than torchrun started
    them."""
    json: bool = False
    """Print the result of the run as JSON, with summary.json, on the first rank's stdout."""


def router_options_of(config: TrainConfig) -> RouterOptions:
    """Returns what a run adds to routers."""
    return RouterOptions(config.router_z_loss, config.capacity_factor)


def degrees_of(config: TrainConfig) -> Degrees:
    """Returns the degrees of a configuration."""
    return Degrees(**{field.name: getattr(config, field.name) for field in fields(Degrees)})


def with_resolved_degrees(config: TrainConfig, world_size: int) -> TrainConfig:
    """Returns a configuration whose ``dp_shard`` is a number of ranks.

    Args:
        config: of a run, whose ``dp_shard`` may stand for the rest of the ranks.
        world_size: number of ranks; those of a pipeline stage are ``pp_degree`` times fewer.

    Raises:
        UsageError: the other degrees do not divide the ranks, or the system takes no degrees.
    """
    if config.dp_shard != REST:
        return config
    degrees = degrees_of(config)
    get_system(config.system, degrees)  # where there is one rank, 1 is no other degree
    ranks, remainder = divmod(world_size, config.pp_degree)
    # A remainder is refused with the options of the pipeline.
    return replace(config, dp_shard=1 if remainder else degrees.rest_of(ranks))


def parse_config(arguments: Sequence[str]) -> TrainConfig:
    """Parses ``arguments``, without the program's name.

    Raises:
        UsageError: an option or a TOML key is unknown, or a value has the wrong type.
        SystemExit: after ``--help`` (0), or with 2 after tyro has named the invalid argument.
    """
    pre_parser = argparse.ArgumentParser(prog=_PROGRAM, add_help=False, allow_abbrev=False)
    pre_parser.add_argument("--config", type=Path)
    known, rest = pre_parser.parse_known_args(arguments)
    default = TrainConfig() if known.config is None else read_toml(known.config)
    try:
        parsed = tyro.cli(
            TrainConfig,
            prog=_PROGRAM,
            description=_DESCRIPTION,
            args=rest,
            default=default,
        )
    except ValidationError as error:
        raise UsageError(_describe(error, "the command line")) from error
    return replace(parsed)


def read_toml(path: Path) -> TrainConfig:
    """Reads the configuration from a TOML file, whose keys are the field names.

    Raises:
        UsageError: the file cannot be read or parsed, or has an unknown key or an invalid value.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the configuration {path}: {error.strerror}; give another --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}; correct the file") from error
    try:
        return TypeAdapter(TrainConfig).validate_python(values)
    except ValidationError as error:
        raise UsageError(_describe(error, str(path))) from error


def _describe(error: ValidationError, source: str) -> str:
    problems = [
        f"{'.'.join(str(part) for part in problem['loc'])} = {problem['input']!r}: {problem['msg']}"
        for problem in error.errors()
    ]
    return f"in {source}: " + "; ".join(problems)
