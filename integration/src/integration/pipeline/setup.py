"""From the options of a run to its system in a pipeline."""

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

# What shares out a stage of a DiT without replacing its parameters.
_WITH_DIT = ("single", "ddp")


def with_pipeline(system: System, shape: ModelShape, config: TrainConfig, world: int) -> System:
    """Return ``system`` in the pipeline that ``config`` asks for, or as it is.

    The model is built on the meta device: what a stage may begin with is what the model has.

    Raises:
        UsageError: the options do not fit each other, the model, the system or ``world`` ranks.
    """
    if config.pp_degree == 1:
        return system
    schedule = get_schedule(config.pp_schedule)
    if world % config.pp_degree:
        raise UsageError(
            f"--pp-degree {config.pp_degree} does not divide {world} ranks; give a number of ranks"
            " that is a multiple of it"
        )
    _check_partner(system.name, schedule)
    if shape.family == "dit" and system.name not in _WITH_DIT:
        raise UsageError(
            f"system {system.name!r} does not support --pp-degree for a DiT, whose positions are a"
            f" parameter that stages share; use --system {' or '.join(_WITH_DIT)}"
        )
    microbatches = config.pp_microbatches or config.micro_batch
    if config.micro_batch % microbatches:
        raise UsageError(
            f"--pp-microbatches {microbatches} do not divide --micro-batch {config.micro_batch},"
            " whose parts they are; make it a multiple of them"
        )
    if config.fingerprint:
        raise UsageError(
            "--fingerprint needs all weights on every rank, and a pipeline's have some; leave it"
            " out, or use --pp-degree 1"
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


def _check_partner(system: str, schedule: PipelineSchedule) -> None:
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
