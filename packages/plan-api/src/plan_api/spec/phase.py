"""When a placement holds."""

from __future__ import annotations

import enum

__all__ = ["Phase"]


class Phase(enum.Enum):
    """The times in a training step at which a parameter may be placed differently.

    INIT is how it rests between steps, and unless others say otherwise how it is at all times.
    RUN is how forward and backward use it: a parameter that rests otherwise is moved there before
    its module runs, and let go afterwards. OPTIM is how the optimizer and checkpoints see it: if it
    rests otherwise, it is moved after the optimizer has changed it, and stays. GRAD is how its
    gradient is kept during backward. Activations and buffers know no phases.

    The four ways of data parallelism (Rajbhandari et al., ZeRO), with N ranks on an axis and of a
    parameter's elements so many kept by, and sent from, each rank:

    ========== ==== ==== ==== ===== =========== ========= ====
    way        INIT RUN  GRAD OPTIM parameters  gradients sent
    ========== ==== ==== ==== ===== =========== ========= ====
    replicated R                    1           1         2
    ZeRO-1     R              S(0)  1 + 1/N     1         2
    ZeRO-2     R         S(0) S(0)  1 + 1/N     1/N       2
    ZeRO-3     S(0) R               1/N         1/N       3
    ========== ==== ==== ==== ===== =========== ========= ====
    """

    INIT = "init"
    RUN = "run"
    GRAD = "grad"
    OPTIM = "optim"
