"""What the simulation is told on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import tyro

from integration.compare.options import option_arguments
from integration.errors import UsageError
from integration.paths import require_folder
from integration.scale.cost import Machine, NetworkLink
from integration.scale.shapes import SHAPES, Shape, shape_named
from integration.scale.strategies import STRATEGIES, axes_of, strategies_of, strategy_named

_DESCRIPTION = """Simulate training on up to 16,384 ranks.

Plays one rank of worlds of that many: measures how long it takes to begin and what dispatch costs,
counts what it sends in a step, and predicts throughput from that by a stated cost model. Writes
OUT/report.md, OUT/report.html and OUT/scale.json. Exit code: 0, or 2 when the options are wrong."""


@dataclass(frozen=True)
class ScaleOptions:
    """The options of a simulation."""

    out: Path = Path("scale-results")
    """Folder of the report."""
    models: str = ",".join(shape.name for shape in SHAPES)
    """Models, separated by commas."""
    ways: str = ",".join(way.name for way in STRATEGIES)
    """Ways to share the work, separated by commas; those without a plan of the zoo for a model are
    left out."""
    ranks: str = "64,256,1024,4096,16384"
    """Sizes of the world, separated by commas."""
    initialisation: bool = True
    """Measure how long rank 0 takes to begin, and with how much memory."""
    dispatch: bool = True
    """Measure what dispatch costs a layer of LLaMA."""
    model_scaling: str = "deepseek-v3"
    """The model that grows from 0.8 to 2 times its depth and width, or nothing."""
    weak_tokens: int = 8192
    """Tokens of each rank in a step, of weak and of model scaling."""
    strong_tokens: str = "16,64,128"
    """Millions (2^20) of tokens of all ranks in a step, of strong scaling, separated by commas."""
    efficiency: float = 0.5
    """Share of the peak FLOP/s that computing reaches."""
    peak_flops: float = 989e12
    """FLOP/s of a rank."""
    inside_bandwidth: float = 360e9
    """Bytes per second of a rank within a node."""
    between_bandwidth: float = 40e9
    """Bytes per second of a rank's own network card."""
    inside_latency: float = 3.4e-6
    """Seconds of a step of a ring within a node; NCCL's constant of its Simple protocol."""
    between_latency: float = 9.6e-6
    """Seconds of such a step between nodes; likewise."""
    overlap: float = 1.0
    """Share of computing beside which collectives of fully_shard can run."""

    def command_line(self) -> list[str]:
        """Return every option spelled out."""
        return option_arguments({field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class ScaleSetup:
    """Options, looked at.

    Attributes:
        options: as given.
        shapes: of the models.
        worlds: sizes, ascending.
        ways: names of ways.
        grows: the model of model scaling, or None.
        batches: tokens of strong scaling.
        machine: of the cost model.
    """

    options: ScaleOptions
    shapes: tuple[Shape, ...]
    worlds: tuple[int, ...]
    ways: tuple[str, ...]
    grows: Shape | None
    batches: tuple[int, ...]
    machine: Machine


def parse_options(arguments: Sequence[str]) -> ScaleOptions:
    """Return what ``arguments`` (without the program's name) ask for.

    Raises:
        SystemExit: after ``--help`` (0), or with 2 after tyro has said which argument is wrong.
    """
    return tyro.cli(
        ScaleOptions,
        prog="python -m integration.scale",
        description=_DESCRIPTION,
        args=arguments,
    )


def prepare(options: ScaleOptions) -> ScaleSetup:
    """Look at the options; nothing is written.

    Raises:
        UsageError: one is wrong.
    """
    require_folder(options.out)
    try:
        shapes = tuple(shape_named(name) for name in _words(options.models, "--models"))
        ways = tuple(strategy_named(name).name for name in _words(options.ways, "--ways"))
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
            for way in strategies_of(shape):
                if way.name in ways:
                    axes_of(way, ranks)
    if options.weak_tokens < 1:
        raise UsageError(f"--weak-tokens {options.weak_tokens} is too few; give at least 1")
    batches = tuple(2**20 * one for one in _numbers(options.strong_tokens, "--strong-tokens"))
    return ScaleSetup(options, shapes, worlds, ways, grows, batches, machine)


def _words(given: str, option: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in given.split(",") if word.strip()))
    if not words:
        raise UsageError(f"{option} {given!r} names nothing; leave it out for all")
    return words


def _numbers(given: str, option: str) -> list[int]:
    words = _words(given, option)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"{option} {given!r} wants whole numbers above 0, separated by commas")
    return [int(word) for word in words]
