"""The learning-rate schedules of a run: warm-up, and linear or cosine decay."""

import math

from torch.optim import Optimizer


class LearningRateSchedule:
    """Sets the learning rates of an optimizer, each as a share of its initial one.

    They depend on the step only, so that a resumed run needs no state.

    Args:
        optimizer: the optimizer, before a checkpoint is loaded into it.
        steps: number of steps of the run.
        warmup: first steps, in which the share grows linearly from 1 / warmup to 1.
        decay: last steps, in which the share falls linearly from 1 to 1 / decay.
        cosine_to: last share of a cosine that falls from 1 over all steps after those of
            ``warmup`` (Loshchilov and Hutter, SGDR, arXiv 1608.03983, equation 5); None: no cosine.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        steps: int,
        warmup: int,
        decay: int,
        cosine_to: float | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._steps, self._warmup, self._decay = steps, warmup, decay
        self._cosine_to = cosine_to
        self._full = [float(group["lr"]) for group in optimizer.param_groups]

    def share(self, step: int) -> float:
        """Returns the share of the full learning rate in ``step``, counted from 1."""
        rising = step / self._warmup if self._warmup else 1.0
        falling = (self._steps - step + 1) / self._decay if self._decay else 1.0
        return min(1.0, rising, falling, self._cosine(step))

    def _cosine(self, step: int) -> float:
        full = max(self._warmup, 1)  # the last step with the full rate
        if self._cosine_to is None or step <= full:
            return 1.0
        progress = (step - full) / (self._steps - full)
        return self._cosine_to + (1 - self._cosine_to) * (1 + math.cos(math.pi * progress)) / 2

    def apply(self, step: int) -> None:
        """Sets the learning rates of ``step``."""
        for group, full in zip(self._optimizer.param_groups, self._full, strict=True):
            group["lr"] = full * self.share(step)
