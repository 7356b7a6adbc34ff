"""The command line of recommendations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from integration.data import BYTES
from integration.errors import UsageError
from integration.models import model_shape
from integration.recommend.hardware import HARDWARE, Hardware
from integration.train.config import TrainConfig
from integration.train.folders import require_folder

__all__ = ["RecommendOptions", "RecommendSetup", "parse_options", "prepare"]

_DESCRIPTION = """Recommend degrees of parallelism, recomputation and offloading.

Predicts time and memory of every way to train that the trainer accepts, prints the fastest that
fit, and writes OUT/recipe.toml for python -m integration.train --config, and OUT/plan.json. Exit
code: 0; 1 if nothing fits; or 2 if the options are invalid."""


@dataclass(frozen=True)
class RecommendOptions:
    """The options of a recommendation."""

    model: tyro.conf.Positional[str]
    """As the trainer's --model: a name, the path of a config.json, or package.module:function."""
    ranks: int
    """Number of ranks."""
    memory: Annotated[float | None, tyro.conf.arg(metavar="GB")] = None
    """GB (10^9 bytes) of a rank that may be used; by default those of --hardware."""
    hardware: Literal["h100", "gloo"] = "h100"
    """h100, hosts of 8; or gloo, CPU ranks of one thread."""
    host_ranks: int | None = None
    """Ranks of a host; by default those of --hardware."""
    global_batch: int | None = None
    """Samples of a step; by default 8, or as many as ranks."""
    sequence_length: int = 64
    """Tokens of a sample of text."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of compute; by default bf16 on an accelerator and fp32 otherwise."""
    optimizer: Literal["adamw", "adam8bit", "muon"] = "adamw"
    """Optimizer. SOAP's state depends on the sizes of matrices and is not predicted."""
    static: bool = False
    """Run operators on local tensors, by plan-api's static mode."""
    top: int = 10
    """Number of recommendations to print."""
    json: bool = False
    """Print the result as JSON instead of a table."""
    out: Path | None = None
    """Folder for recipe.toml and plan.json of the best; by default nothing is written."""


@dataclass(frozen=True)
class RecommendSetup:
    """Validated options.

    Attributes:
        options: the options.
        base: the trainer's options that all candidates have.
        hardware: the machine.
        memory: bytes of a rank.
    """

    options: RecommendOptions
    base: TrainConfig
    hardware: Hardware
    memory: float


def parse_options(arguments: Sequence[str]) -> RecommendOptions:
    """Parses ``arguments``, without the program's name.

    Raises:
        SystemExit: after ``--help`` (0), or with 2 after tyro has named the invalid argument.
    """
    return tyro.cli(
        RecommendOptions,
        prog="python -m integration.recommend",
        description=_DESCRIPTION,
        args=arguments,
    )


def prepare(options: RecommendOptions) -> RecommendSetup:
    """Validates the options; nothing is written.

    Raises:
        UsageError: an option is invalid.
    """
    numbers = {
        "--ranks": options.ranks, "--top": options.top, "--global-batch": options.global_batch,
        "--sequence-length": options.sequence_length, "--host-ranks": options.host_ranks,
        "--memory": options.memory,
    }  # fmt: skip
    for option, value in numbers.items():
        if value is not None and not value > 0:
            raise UsageError(f"{option}: expected a number above 0, got {value}; give another")
    if options.out is not None:
        require_folder(options.out)
    model_shape(options.model)  # refuses unknown ones
    hardware = HARDWARE[options.hardware]
    if options.host_ranks is not None:
        hardware = replace(hardware, machine=replace(hardware.machine, node=options.host_ranks))
    memory = hardware.machine.memory if options.memory is None else options.memory * 1e9
    dtype = options.dtype or ("bf16" if hardware.accelerator else "fp32")
    base = TrainConfig(
        system="plan", model=options.model, static=options.static, tokenizer=BYTES,
        global_batch=options.global_batch or max(8, options.ranks),
        sequence_length=options.sequence_length, dtype=dtype, optimizer=options.optimizer,
        # The trainer's accelerator here, for validation: nothing runs.
        device="sim" if hardware.accelerator else "cpu",
    )  # fmt: skip
    return RecommendSetup(options, base, hardware, memory)
