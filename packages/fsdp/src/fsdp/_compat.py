"""What is private in torch, and may differ between the supported versions."""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import fully_shard as torch_fully_shard

__all__ = ["tell_torch"]


def tell_torch(module: nn.Module, state: object) -> None:
    """Lets ``torch.distributed.fsdp.fully_shard.state(module)`` find our state.

    torch's pipeline stages ask it for the states below a stage, to reduce after the last
    microbatch; and torch's own fully_shard refuses the module then.
    """
    registry = module.__dict__.setdefault(STATE_KEY, {})
    registry[torch_fully_shard.__wrapped__] = state  # type: ignore[attr-defined]
