"""The schedules of torch.distributed.pipelining, and what each asks of stages and microbatches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from integration.errors import UsageError


@dataclass(frozen=True)
class PipelineSchedule:
    """One way to order the forwards and backwards of microbatches.

    Attributes:
        name: torch's, and the users'.
        stages_per_rank: how many a rank has; None: two or more.
        v_shaped: whether ranks are passed forwards and then backwards: rank 0 has the first stage
            and the last. Otherwise they are passed again from the first.
        splits_backward: whether gradients of inputs and of weights are taken apart.
        fills: whether it needs as many microbatches as stages.
        rounds: whether microbatches come in rounds of at least as many as there are ranks.
    """

    name: str
    stages_per_rank: int | None = 1
    v_shaped: bool = False
    splits_backward: bool = False
    fills: bool = False
    rounds: bool = False

    def stages(self, degree: int, split_points: Sequence[str] | None) -> int:
        """Return the number of stages on ``degree`` ranks, by default as few as possible.

        Raises:
            UsageError: the split points make another number than the schedule can place.
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
            wanted = f"{per_rank * degree - 1}" + ("" if self.stages_per_rank else " or more")
            raise UsageError(
                f"{len(split_points)} split points make {stages} stages, and schedule {self.name}"
                f" has {'' if self.stages_per_rank else 'a whole number of at least '}{per_rank} on"
                f" each of {degree} ranks; give {wanted} split points"
            )
        return stages

    def check_microbatches(self, microbatches: int, degree: int, stages: int) -> None:
        """Refuse a number of microbatches that the schedule cannot order.

        Raises:
            UsageError: with the number that it needs.
        """
        if self.fills and microbatches < stages:
            raise UsageError(
                f"--pp-microbatches {microbatches} are too few for schedule {self.name} on {stages}"
                f" stages; give at least {stages}"
            )
        rounds = max(1, microbatches // degree)
        if self.rounds and microbatches % rounds:
            raise UsageError(
                f"--pp-microbatches {microbatches} do not divide into {rounds} equal rounds, which"
                f" schedule {self.name} makes on {degree} ranks; give a multiple of {degree}"
            )

    def stages_of(self, rank: int, degree: int, stages: int) -> tuple[int, ...]:
        """Return the indices of a rank's stages, in the order of their calls."""
        if self.v_shaped:
            return rank, stages - 1 - rank
        return tuple(range(rank, stages, degree))

    def build(
        self,
        stages: list[PipelineStage],
        microbatches: int,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
    ) -> Any:
        """Return torch's schedule of a rank's stages; gradients are summed over microbatches."""
        made: Any = get_schedule_class(self.name)
        given = stages[0] if self.stages_per_rank == 1 else stages
        return made(given, microbatches, loss_fn=loss_fn, scale_grads=False)


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
    """Return the schedule called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in SCHEDULES:
        raise UsageError(f"unknown schedule {name!r}; choose one of: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
