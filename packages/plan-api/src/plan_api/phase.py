"""When a placement holds."""

from __future__ import annotations

import enum

__all__ = ["Phase"]


class Phase(enum.Enum):
    """The times in a training step at which a tensor may be placed differently.

    INIT is how a parameter rests: what the optimizer and checkpoints see. RUN is how forward and
    backward use it. Activations know RUN only.
    """

    INIT = "init"
    RUN = "run"
