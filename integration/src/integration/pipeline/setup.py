"""Makes a run's system pipeline parallel according to its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from integration.errors import UsageError
from integration.models import ModelShape, build_model_on_meta
from integration.pipeline.layout import PipelineOptions, make_layout
from integration.pipeline.schedules import PipelineSchedule, get_schedule
from integration.pipeline.stage_parallelism import (
    STAGE_SYSTEMS,
    SUPPORTED_SCHEDULES,
    UNSUPPORTED_REASONS,
)
from integration.pipeline.system import PipelineSystem
from integration.systems.base import System

if TYPE_CHECKING:
    from integration.train.config import TrainConfig

# Systems that parallelize a stage of a DiT without replacing its parameters.
_DIT_SYSTEMS = ("single", "ddp")


def with_pipeline(system: System, shape: ModelShape, config: TrainConfig, world: int) -> System:
    """Returns the pipeline of ``config`` around ``system``, or ``system`` if there is none.

    The model is built on the meta device to find its split points.

    Raises:
        UsageError: the options are incompatible with each other, the model, the system or the
            number of ranks.
    """
    if config.pp_degree == 1:
        return system
    schedule = get_schedule(config.pp_schedule)
    if world % config.pp_degree:
        raise UsageError(
            f"--pp-degree: expected a divisor of the {world} ranks, got {config.pp_degree};"
            " give another, or another number of ranks"
        )
    _check_stage_system(system.name, schedule)
    if shape.family == "dit" and system.name not in _DIT_SYSTEMS:
        raise UsageError(
            f"system {system.name!r} does not support --pp-degree for a DiT, whose stages share"
            " the parameter of position embeddings; use --system"
            f" {' or '.join(_DIT_SYSTEMS)}"
        )
    microbatches = config.pp_microbatches or config.micro_batch
    if config.micro_batch % microbatches:
        raise UsageError(
            f"--pp-microbatches: expected a divisor of --micro-batch {config.micro_batch}, got"
            f" {microbatches}; give another, or another --micro-batch"
        )
    if config.fingerprint:
        raise UsageError(
            "--fingerprint: expected --pp-degree 1, as it needs all weights on every rank, got"
            f" --pp-degree {config.pp_degree}; leave it out, or use --pp-degree 1"
        )
    points = config.pp_split_points
    options = PipelineOptions(
        degree=config.pp_degree,
        split_points=None if points is None else tuple(map(str.strip, points.split(","))),
        schedule=schedule,
        microbatches=microbatches,
    )
    return PipelineSystem(
        system, make_layout(options, build_model_on_meta(shape, dropout=config.dropout))
    )


def _check_stage_system(system: str, schedule: PipelineSchedule) -> None:
    if system not in STAGE_SYSTEMS:
        raise UsageError(
            f"system {system!r} does not support --pp-degree;"
            f" use one of: {', '.join(STAGE_SYSTEMS)}"
        )
    if schedule.name not in SUPPORTED_SCHEDULES[system]:
        raise UsageError(
            f"system {system!r} does not support --pp-schedule {schedule.name}:"
            f" {UNSUPPORTED_REASONS[system]};"
            f" use --pp-schedule {' or '.join(SUPPORTED_SCHEDULES[system])}, or --system fsdp2"
        )
