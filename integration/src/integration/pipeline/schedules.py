"""The schedules of torch.distributed.pipelining, and their requirements."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from integration.errors import UsageError


@dataclass(frozen=True)
class PipelineSchedule:
    """A pipeline schedule of torch.

    Attributes:
        name: torch's name.
        stages_per_rank: number of stages on each rank; None: two or more.
        v_shaped: whether stages are placed in a V: rank 0 has the first stage and the last.
            Otherwise stages are placed in a loop over the ranks.
        splits_backward: whether gradients of inputs and of weights are computed separately.
        fills: whether it needs at least as many microbatches as stages.
        rounds: whether microbatches are run in rounds of at least the pipeline degree.
    """

    name: str
    stages_per_rank: int | None = 1
    v_shaped: bool = False
    splits_backward: bool = False
    fills: bool = False
    rounds: bool = False

    def stages(self, degree: int, split_points: Sequence[str] | None) -> int:
        """Returns the number of stages on ``degree`` ranks, by default as few as possible.

        Raises:
            UsageError: the schedule does not support the number of stages.
        """
        per_rank = self.stages_per_rank or 2
        if split_points is None:
            return per_rank * degree
        stages = len(split_points) + 1
        if stages % degree or stages < per_rank * degree:
            fits = False
        else:
            fits = self.stages_per_rank in (None, stages // degree)
        if not fits:
            expected = f"{per_rank * degree - 1}" + ("" if self.stages_per_rank else " or more")
            raise UsageError(
                f"{len(split_points)} split points make {stages} stages, and schedule {self.name}"
                f" has {'' if self.stages_per_rank else 'a whole number of at least '}{per_rank} on"
                f" each of {degree} ranks; give {expected} split points"
            )
        return stages

    def check_microbatches(self, microbatches: int, degree: int, stages: int) -> None:
        """Refuses a number of microbatches that the schedule does not support.

        Raises:
            UsageError: names the number that it needs.
        """
        if self.fills and microbatches < stages:
            raise UsageError(
                f"--pp-microbatches: expected at least {stages} for schedule {self.name} on"
                f" {stages} stages, got {microbatches}; give more"
            )
        rounds = max(1, microbatches // degree)
        if self.rounds and microbatches % rounds:
            raise UsageError(
                f"--pp-microbatches: expected {rounds} equal rounds, which schedule {self.name}"
                f" makes on {degree} ranks, got {microbatches}; give a multiple of {degree}"
            )

    def stages_of(self, rank: int, degree: int, stages: int) -> tuple[int, ...]:
        """Returns the indices of a rank's stages, in the order of their calls."""
        if self.v_shaped:
            return rank, stages - 1 - rank
        return tuple(range(rank, stages, degree))

    def build(
        self,
        stages: Sequence[PipelineStage],
        microbatches: int,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
    ) -> Any:
        """Returns torch's schedule of a rank's stages; gradients are summed over microbatches."""
        make_schedule: Any = get_schedule_class(self.name)
        own = stages[0] if self.stages_per_rank == 1 else [*stages]
        return make_schedule(own, microbatches, loss_fn=loss_fn, scale_grads=False)


SCHEDULES: dict[str, PipelineSchedule] = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule("GPipe"),
        PipelineSchedule("1F1B", fills=True),
        PipelineSchedule("Interleaved1F1B", None, rounds=True),
        PipelineSchedule("InterleavedZeroBubble", None, splits_backward=True, rounds=True),
        PipelineSchedule("ZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
        PipelineSchedule("DualPipeV", 2, v_shaped=True, splits_backward=True, fills=True),
    )
}


def get_schedule(name: str) -> PipelineSchedule:
    """Returns the schedule with this name.

    Raises:
        UsageError: there is none.
    """
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule {name!r}; choose one of: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
