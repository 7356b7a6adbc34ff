"""torch's pipeline stage for modules that return DTensors, or what a model returns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from integration.models import loss_of
from integration.pipeline.stage_random import StageRandom

if TYPE_CHECKING:
    from plan_api import AttentionMask


class Stage(PipelineStage):
    """A ``PipelineStage`` that returns the loss, or this rank's shards of what it passes on.

    Stages of one rank and the next rank's have the same placements, so that plain tensors are sent.

    Attributes:
        random: where its random numbers are in one device's stream; None: they are this rank's.
        masks: of each microbatch's documents, which a plan's attention takes; empty: it takes none.
    """

    random: StageRandom | None = None
    masks: Sequence[AttentionMask] = ()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs a microbatch; torch's schedules call it."""
        if self.random is not None:
            self.random.enter(self.stage_index, fwd_chunk_id)
        with self._mask(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs a microbatch's backward, in which layers may be recomputed; schedules call it."""
        with self._mask(bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Runs the gradients of weights, on the first stage all of them; zero-bubble schedules do.

        Layers may be recomputed here, too.
        """
        with self._mask(bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _mask(self, chunk: int) -> AbstractContextManager[None]:
        if not self.masks:
            return nullcontext()
        from plan_api import attention_mask

        return attention_mask(self.masks[chunk])

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; torch's schedules call it for each microbatch."""
        output = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        return stage_output(output, last=self.is_last)

    # torch's V-shaped schedules pass gradients between a rank's stages also where there are none.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Returns the gradients of a microbatch's inputs; torch's schedules call it."""
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Takes the gradients of a microbatch's outputs; torch's schedules call it."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def stage_output(output: Any, *, last: bool) -> Any:
    """Returns the loss in the last stage's output, and the local tensors of another's."""
    if last:
        loss = loss_of(output)
        return loss.full_tensor() if isinstance(loss, DTensor) else loss
    return tuple(map(_local, output)) if isinstance(output, tuple) else _local(output)


def _local(tensor: Tensor) -> Tensor:
    # A copy, as zero-bubble schedules detach a stage's outputs in place, which views forbid.
    return tensor.to_local().clone() if isinstance(tensor, DTensor) else tensor
