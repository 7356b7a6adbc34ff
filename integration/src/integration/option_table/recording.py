"""What the observations of all tables record of tensors and collectives."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from testkit import Collective, CommLog

__all__ = ["local_tensor", "sent_collectives"]


def local_tensor(tensor: Any) -> Any:
    """Returns this rank's part of a DTensor, and a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sent_collectives(log: CommLog) -> tuple[Collective, ...]:
    """Returns the collectives of a log that send data to other ranks."""
    return tuple(call for call in log.calls if call.op != "barrier" and call.group_size != 1)
