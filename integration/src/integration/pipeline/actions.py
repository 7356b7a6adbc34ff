"""Records the forwards and backwards of a rank's pipeline stages, with their durations."""

import time
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import PipelineStage

FORWARD = "F"
BACKWARD = "B"
BACKWARD_OF_INPUTS = "I"
BACKWARD_OF_WEIGHTS = "W"


@dataclass(frozen=True)
class Action:
    """A forward or backward of one microbatch through one stage.

    Attributes:
        seconds: CPU time of the thread, which excludes waiting for other ranks and processes.
    """

    kind: str
    stage: int
    microbatch: int
    seconds: float


class TimedStage(PipelineStage):
    """A ``PipelineStage`` that appends its actions to ``log``, a list shared by a rank's stages."""

    log: list[Action]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs and records a forward."""
        started = time.thread_time()
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._note(FORWARD, fwd_chunk_id, started)
        return result

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Runs and records a backward, either full or of the stage's inputs only."""
        started = time.thread_time()
        result = super().backward_one_chunk(
            bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
        )
        self._note(BACKWARD if full_backward else BACKWARD_OF_INPUTS, bwd_chunk_id, started)
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs and records a backward of weights."""
        started = time.thread_time()
        result = super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._note(BACKWARD_OF_WEIGHTS, bwd_chunk_id, started)
        return result

    def _note(self, kind: str, microbatch: int, started: float) -> None:
        # On the CPU autograd runs in the calling thread.
        seconds = time.thread_time() - started
        self.log.append(Action(kind, self.stage_index, microbatch, seconds))
