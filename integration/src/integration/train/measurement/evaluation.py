"""Evaluates a model on held-out samples, between the steps of its training.

Training does not depend on it: nothing is drawn from the random generators, and no state of the
model or the optimizer changes. The loss is the same on any product, as the samples and the sizes of
microbatches are those of a step of training.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from integration.data import BatchLoader
from integration.systems import System


class Evaluator:
    """Computes the loss of held-out samples; all ranks call it together.

    Args:
        system: system that has wrapped the model.
        model: the model as it has wrapped it.
        loader: loader of this rank's microbatches of the held-out samples.
        steps: number of global batches that the held-out samples make.
    """

    def __init__(
        self, system: System, model: nn.Module, loader: BatchLoader, *, steps: int
    ) -> None:
        self._system, self._model = system, model
        self._loader, self._steps = loader, steps

    def loss(self) -> float:
        """Returns the mean loss of all held-out samples, without dropout."""
        device = self._system.device
        generators = device.random_state()
        total = torch.zeros((), dtype=torch.float64, device=device.current)
        count = 0
        with _evaluating(self._system.evaluated_modules(self._model)):
            self._loader.load_state_dict({"step": 0})
            for _ in range(self._steps):
                for batch in next(self._loader):
                    total += plain_loss(self._system.evaluate(self._model, batch))
                    count += 1
        device.set_random_state(generators)
        dist.all_reduce(total)
        return float(total) / count / dist.get_world_size()


def plain_loss(loss: Tensor) -> Tensor:
    """Returns a loss as a plain tensor."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Disables gradients and dropout within the context, and frees gathered parameters after it."""
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in modules:
            module.train()
            # The root keeps its parameters gathered for a backward that does not follow.
            for each in module.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()
