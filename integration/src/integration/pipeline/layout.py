"""Splits a model into the stages of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from integration.pipeline.chain import check_split, even_split, require_untied, stage_units
from integration.pipeline.families import family_of
from integration.pipeline.schedules import PipelineSchedule


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a pipeline.

    Attributes:
        degree: pipeline parallel degree.
        split_points: first module of each stage but the first; None: even stages.
        schedule: order of forwards and backwards.
        microbatches: microbatches of the schedule per microbatch of the trainer.
    """

    degree: int
    split_points: tuple[str, ...] | None
    schedule: PipelineSchedule
    microbatches: int


@dataclass(frozen=True)
class PipelineLayout:
    """Validated options of a pipeline.

    Attributes:
        stages: the units of each stage.
    """

    degree: int
    microbatches: int
    schedule: PipelineSchedule
    stages: tuple[tuple[str, ...], ...]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the indices of the stages of a rank of the pipeline."""
        return self.schedule.stages_of(rank, self.degree, len(self.stages))


def make_layout(options: PipelineOptions, model: nn.Module) -> PipelineLayout:
    """Splits a model, which may be on the meta device, into stages.

    Raises:
        UsageError: the schedule does not support the number of stages or microbatches, or the
            model cannot be split at the split points.
    """
    schedule = options.schedule
    stages = schedule.stages(options.degree, options.split_points)
    schedule.check_microbatches(options.microbatches, options.degree, stages)
    chain = family_of(model).chain(model)
    require_untied(model, chain)
    points: Sequence[str]
    if options.split_points is None:
        points = even_split(chain, stages)
    else:
        points = options.split_points
        check_split(chain, points)
    return PipelineLayout(
        options.degree, options.microbatches, schedule, stage_units(chain, points)
    )
