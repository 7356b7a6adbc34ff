"""What a run is told, typed and checked, from the command line and from TOML."""

import argparse
import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from integration.errors import UsageError
from integration.systems import Degrees
from integration.train.activation_checkpointing import Recompute
from integration.train.compiled import Backend

AUTO_RESUME = "auto"
NEVER_RESUME = "never"
# Values of --random.
NATIVE_RANDOM: Literal["stock"] = "stock"
DIST_RNG_RANDOM: Literal["dist-rng"] = "dist-rng"

_PROGRAM = "python -m integration.train"
_DESCRIPTION = """Train a model and write a run folder: metrics.jsonl, summary.json, checkpoints.

--config FILE.toml gives the same options from a file (keys with underscores); the command line
overrides it. Start it directly, with --ranks N, or under torchrun."""

Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TrainConfig:
    """The options of one run."""

    system: str = "single"
    """How to run: single, ddp, fsdp1, fsdp2, fsdp, deepspeed, dtensor-tp; or, with the degrees
    below, plan or torchtitan-style."""
    model: str = "llama-10m"
    """llama-10m, llama-tiny, mixtral-10m, mixtral-tiny, dit-3m, dit-small or dit-tiny."""
    dp_replicate: Positive = 1
    """plan: data parallel ranks with copies of parameters."""
    dp_shard: Positive = 1
    """plan: data parallel ranks that share parameters (FSDP); beside --dp-replicate, HSDP."""
    ep: Positive = 1
    """plan: of the data parallel ranks, those that divide Mixtral's experts; or as many as --tp."""
    cp: Positive = 1
    """plan: context parallel ranks, which cut LLaMA's sequences."""
    cp_method: Literal["ring", "all-gather", "ulysses"] = "ring"
    """plan: of attention over them."""
    tp: Positive = 1
    """plan: tensor parallel ranks."""
    sp: bool = False
    """plan: cut hidden states between attention and MLP along the sequence, by --tp."""
    loss_parallel: bool = False
    """plan: leave logits cut along the vocabulary, by --tp, up to the loss."""
    zero3: bool = False
    """plan: share parameters along --dp-shard by phases of the plan instead of by package fsdp."""
    static: bool = False
    """plan: run operators on local tensors, by plan-api's static mode."""
    pp_degree: Positive = 1
    """Pipeline stages' ranks; the system shares each stage among the others."""
    pp_split_points: str | None = None
    """Names of the modules that further stages begin with, by commas; by default even stages."""
    pp_schedule: str = "1F1B"
    """GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV."""
    pp_microbatches: Positive | None = None
    """Parts of a micro batch that are in the pipeline at once; by default its samples."""
    data: Path | None = None
    """File or folder of text; by default the Python standard library's sources. DiT takes none."""
    out: Path = Path("runs/latest")
    """Run folder to write."""
    steps: Positive = 100
    """Optimizer steps in all, those before a resume included."""
    global_batch: Positive = 8
    """Samples per optimizer step: micro batch x accumulation x data-parallel degree."""
    micro_batch: Positive = 4
    """Samples that one rank feeds the model at once."""
    sequence_length: Positive = 64
    """Tokens (bytes) per sample of text."""
    optimizer: Literal["adamw", "adam8bit", "muon"] = "adamw"
    """torch's fused AdamW; fsdp's AdamW of 8-bit moments; or its Muon, and AdamW for the rest."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """The optimizer's learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Its decoupled weight decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps, in which the learning rate grows to its full size, linearly."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """Last steps, in which it falls towards 0, linearly; between the two it is stable."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Scale gradients down to this norm where theirs is larger."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the weights and of the order of the data."""
    init: Literal["whole", "sharded"] = "whole"
    """whole: every rank draws all weights and keeps its part; sharded: it draws its part only."""
    init_from: Path | None = None
    """Folder of safetensors, as save_pretrained writes it, whose weights are the initial ones."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of a zero: in attention's weights, of DiT behind linear layers."""
    random: Literal["stock", "dist-rng"] = NATIVE_RANDOM
    """Who draws random DTensors: torch, or dist-rng, which gives one device's numbers."""
    fingerprint: bool = False
    """Write hashes of the initial weights and the first step's dropout masks into the summary."""
    activation_checkpointing: Recompute = "none"
    """What backward computes again instead of keeping it: nothing, all of each layer (full), all
    but matrix products and attention (selective-op), or all of some layers (selective-layer)."""
    activation_checkpointing_every: Positive = 2
    """Of how many layers selective-layer computes one again."""
    compile: Backend = "none"
    """torch.compile each layer, by this backend."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What is computed in; bf16 keeps weights and the reduction of gradients in fp32."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0 saves only at the end and on SIGTERM."""
    checkpoint_async: bool = False
    """Write those of checkpoint-every while training goes on, from a copy of the state."""
    final_checkpoint: bool = True
    """Write one of the last step, so that a finished run leaves its weights."""
    keep_checkpoints: Annotated[int, Field(ge=0)] = 0
    """Complete checkpoints to keep, the newest; 0 keeps all."""
    resume: str = AUTO_RESUME
    """auto (newest complete checkpoint of the run folder), never, or a checkpoint folder."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    profile_steps: str | None = None
    """Steps to profile, as 10:13, the last included; traces are in the run folder's profile/."""
    count_collectives: Positive | None = None
    """Step whose collectives are counted into the summary; it takes longer."""
    peak_flops: Annotated[float, Field(gt=0)] | None = None
    """FLOP/s of one rank at best, of which MFU is a share; by default known or measured."""
    ranks: Positive | None = None
    """Start this many ranks on this machine; leave it out under torchrun."""
    hosts: Positive = 1
    """Start the same command on so many hosts, with --ranks of each."""
    host_rank: Annotated[int, Field(ge=0)] = 0
    """Which of the hosts this is, counted from 0."""
    rendezvous: str | None = None
    """Where ranks of several hosts meet: NAME:PORT of host 0."""
    threads: Positive = 1
    """CPU threads per rank."""
    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds after which a collective that does not finish is an error."""
    join_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds to wait for other ranks at the start."""


def degrees_of(config: TrainConfig) -> Degrees:
    """Returns what a configuration says of the ranks along each axis."""
    return Degrees(**{field.name: getattr(config, field.name) for field in fields(Degrees)})


def parse_config(arguments: Sequence[str]) -> TrainConfig:
    """Returns the configuration that ``arguments`` (without the program's name) ask for.

    Raises:
        UsageError: an option or a TOML key is unknown, or a value does not fit its type.
        SystemExit: after ``--help`` (0), or with 2 after tyro has said which argument is wrong.
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
    """Returns the configuration written in a TOML file; keys are the field names.

    Raises:
        UsageError: the file cannot be read or parsed, or holds an unknown key or a bad value.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the configuration {path}: {error.strerror}; give another --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}; mend it there") from error
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
