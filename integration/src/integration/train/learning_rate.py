"""The learning rate over a run: warm-up, stable, decay."""

from torch.optim import Optimizer


class LearningRateSchedule:
    """Sets an optimizer's learning rates, each as a share of the one it was built with.

    They follow from the number of a step alone, so a resumed run needs no state of it.

    Args:
        optimizer: as it was built, before a checkpoint is loaded into it.
        steps: of the run.
        warmup: first steps, in which the share grows from 1 / warmup to 1.
        decay: last steps, in which it falls from 1 towards 0, the last being 1 / decay.
    """

    def __init__(self, optimizer: Optimizer, *, steps: int, warmup: int, decay: int) -> None:
        self._optimizer = optimizer
        self._steps, self._warmup, self._decay = steps, warmup, decay
        self._full = [float(group["lr"]) for group in optimizer.param_groups]

    def share(self, step: int) -> float:
        """Of the full learning rate, in the step of this number, counted from 1."""
        rising = step / self._warmup if self._warmup else 1.0
        falling = (self._steps - step + 1) / self._decay if self._decay else 1.0
        return min(1.0, rising, falling)

    def apply(self, step: int) -> None:
        """Sets the learning rates of a step."""
        for group, full in zip(self._optimizer.param_groups, self._full, strict=True):
            group["lr"] = full * self.share(step)
