"""The stages of a model under the options of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from integration.pipeline.chain import check_split, even_split, require_untied, stage_units
from integration.pipeline.families import family_of
from integration.pipeline.schedules import PipelineSchedule


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a pipeline, as they are given.

    Attributes:
        degree: ranks that a microbatch passes through.
        split_points: names of the modules that further stages begin with; None: even stages.
        schedule: the order of forwards and backwards.
        microbatches: into how many parts the schedule cuts what a rank is fed at once.
    """

    degree: int
    split_points: tuple[str, ...] | None
    schedule: PipelineSchedule
    microbatches: int


@dataclass(frozen=True)
class PipelineLayout:
    """Options that were found to fit a model and a number of ranks.

    Attributes:
        stages: the units of each stage.
    """

    degree: int
    microbatches: int
    schedule: PipelineSchedule
    stages: tuple[tuple[str, ...], ...]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the stages of a rank of the pipeline."""
        return self.schedule.stages_of(rank, self.degree, len(self.stages))


def make_layout(options: PipelineOptions, model: nn.Module) -> PipelineLayout:
    """Cut a model, which may be on the meta device, into stages.

    Raises:
        UsageError: the schedule does not go with the stages or the microbatches; or
            the model cannot be cut, or not there.
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
