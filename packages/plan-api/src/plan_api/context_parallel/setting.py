"""What every method of attention is told of one call."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from plan_api.context_parallel.order import Order
from plan_api.runtime.error_context import StepContext

__all__ = ["Setting"]


@dataclass(frozen=True)
class Setting:
    """One call of attention, on local tensors of (batch, heads, sequence, features).

    Attributes:
        mesh: the plan's.
        axis: of it, by number, along which the sequence is cut.
        order: in which it is.
        causal: whether each query sees the keys up to itself only.
        scale: of products before the softmax; None: by the root of the number of features.
        where: the module, for messages.
        in_backward: the step of the plan, for messages of backward; None: there is no plan.
    """

    mesh: DeviceMesh
    axis: int
    order: Order
    causal: bool
    scale: float | None
    where: str
    in_backward: StepContext | None = None

    @property
    def rank(self) -> int:
        """This one, along the axis."""
        return self.mesh.get_local_rank(self.axis)
