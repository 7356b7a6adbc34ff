"""The command line of the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import tyro

from integration.compare.run import option_arguments
from integration.errors import UsageError
from integration.scale.cost import Machine, NetworkLink
from integration.scale.shapes import SHAPES, Shape, shape_named
from integration.scale.strategies import STRATEGIES, axes_of, strategies_of, strategy_named
from integration.train.folders import require_folder

_DESCRIPTION = """Simulate training on up to 16,384 ranks.

Simulates rank 0 of each world: measures initialisation and dispatch, counts the collectives of a
step, and predicts throughput by a documented cost model. Writes OUT/report.md, OUT/report.html and
OUT/scale.json. Exit code: 0, or 2 if the options are invalid."""


@dataclass(frozen=True)
class ScaleOptions:
    """The options of a simulation."""

    out: Path = Path("scale-results")
    """Folder of the report."""
    models: str = ",".join(shape.name for shape in SHAPES)
    """Models, separated by commas."""
    strategies: str = ",".join(strategy.name for strategy in STRATEGIES)
    """Strategies, separated by commas; those that need a plan are left out for models without one
    in the zoo."""
    ranks: str = "64,256,1024,4096,16384"
    """Sizes of the world, separated by commas."""
    initialisation: bool = True
    """Measure time and memory of rank 0's initialisation."""
    dispatch: bool = True
    """Measure the dispatch time of a layer of LLaMA."""
    model_scaling: str = "deepseek-v3"
    """Model whose depth and width grow from 0.8 to 2 times the published ones, or nothing."""
    weak_tokens: int = 8192
    """Tokens per rank and step, for weak and model scaling."""
    strong_tokens: str = "16,64,128"
    """Millions (2^20) of tokens per step of all ranks, for strong scaling, separated by commas."""
    efficiency: float = 0.5
    """Share of the peak FLOP/s that compute reaches."""
    peak_flops: float = 989e12
    """Peak FLOP/s of a rank."""
    inside_bandwidth: float = 360e9
    """Bytes per second of a rank within a node."""
    between_bandwidth: float = 40e9
    """Bytes per second of a rank's network card."""
    inside_latency: float = 3.4e-6
    """Seconds of a ring step within a node: NCCL's constant for its Simple protocol."""
    between_latency: float = 9.6e-6
    """Seconds of a ring step between nodes, likewise."""
    overlap: float = 1.0
    """Share of compute time that can overlap with collectives of fully_shard."""
    json: bool = False
    """Print scale.json to stdout."""

    def command_line(self) -> list[str]:
        """Returns every option of the simulation explicitly."""
        names = (field.name for field in fields(self) if field.name != "json")
        return option_arguments({name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class ScaleSetup:
    """Validated options.

    Attributes:
        options: the options.
        shapes: shapes of the models.
        worlds: sizes of the worlds, ascending.
        strategies: names of the strategies.
        grows: model of model scaling, or None.
        batches: tokens per step of strong scaling.
        machine: constants of the cost model.
    """

    options: ScaleOptions
    shapes: tuple[Shape, ...]
    worlds: tuple[int, ...]
    strategies: tuple[str, ...]
    grows: Shape | None
    batches: tuple[int, ...]
    machine: Machine


def parse_options(arguments: Sequence[str]) -> ScaleOptions:
    """Parses ``arguments``, without the program's name.

    Raises:
        SystemExit: after ``--help`` (0), or with 2 after tyro has named the invalid argument.
    """
    return tyro.cli(
        ScaleOptions,
        prog="python -m integration.scale",
        description=_DESCRIPTION,
        args=arguments,
    )


def prepare(options: ScaleOptions) -> ScaleSetup:
    """Validates the options; nothing is written.

    Raises:
        UsageError: an option is invalid.
    """
    require_folder(options.out)
    try:
        shapes = tuple(shape_named(name) for name in _words(options.models, "--models"))
        strategies = tuple(
            strategy_named(name).name for name in _words(options.strategies, "--strategies")
        )
        grows = shape_named(options.model_scaling) if options.model_scaling else None
        machine = Machine(
            options.peak_flops, options.efficiency,
            inside=NetworkLink(options.inside_bandwidth, options.inside_latency),
            between=NetworkLink(options.between_bandwidth, options.between_latency),
            overlap=options.overlap,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from error
    worlds = tuple(sorted(set(_numbers(options.ranks, "--ranks"))))
    for ranks in worlds:
        for shape in shapes:
            for strategy in strategies_of(shape):
                if strategy.name in strategies:
                    axes_of(strategy, ranks)
    if options.weak_tokens < 1:
        raise UsageError(
            f"--weak-tokens: expected at least 1, got {options.weak_tokens}; give more"
        )
    batches = tuple(2**20 * one for one in _numbers(options.strong_tokens, "--strong-tokens"))
    return ScaleSetup(options, shapes, worlds, strategies, grows, batches, machine)


def _words(given: str, option: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in given.split(",") if word.strip()))
    if not words:
        raise UsageError(f"{option}: expected names, got {given!r}; leave it out for all")
    return words


def _numbers(given: str, option: str) -> list[int]:
    words = _words(given, option)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(
            f"{option}: expected whole numbers above 0, separated by commas, got {given!r};"
            " give others"
        )
    return [int(word) for word in words]
