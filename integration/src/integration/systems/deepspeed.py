"""DeepSpeed's ZeRO-3: parameters, gradients and optimizer states in parts, by its engine.

It is imported where it is used, and need not be installed: the other systems do without it.
"""

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from integration.data import Batch
from integration.models import ModelShape, loss_of
from integration.systems.base import System

_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,  # which it only reports; sizes are the batches' own
    "managed_gradient_accumulation": False,  # the training loop says when a step is whole
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,  # torch's fused AdamW, as of every system
    "gradient_clipping": 0.0,  # its default is 1
}


class ZeroThree(System):
    """``deepspeed.initialize`` with stage 3, its defaults, and torch's optimizer inside."""

    name = "deepspeed"
    supports_checkpoints = False

    @property
    def missing(self) -> str | None:
        """Whether it is not installed, and how to."""
        if importlib.util.find_spec("deepspeed") is not None:
            return None
        return "not installed: pip install --no-deps deepspeed hjson einops msgpack"

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Returns a model whose engine starts when it has an optimizer."""
        del shape, world_size
        return EngineModel(model)

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Starts the engine, which cuts the model and the optimizer; returns what steps it."""
        assert isinstance(model, EngineModel)
        return model.start(optimizer)

    def forward_backward(self, model: nn.Module, batch: Batch, *, parts: int, last: bool) -> Tensor:
        """Have the engine reduce and keep the gradients, in each microbatch."""
        del last
        assert isinstance(model, EngineModel)
        # With the linear operator that keeps no gathered weight for backward, as its default is.
        with _linear(model.linear):
            loss = loss_of(model(**batch)) / parts
            model.engine.backward(loss)
        return loss.detach()


class EngineModel(nn.Module):
    """A model, and the engine that runs it once there is an optimizer."""

    engine: Any = None
    linear: Callable[..., Tensor]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def start(self, optimizer: Optimizer) -> Optimizer:
        """Makes the engine; returns an optimizer whose step is the engine's."""
        # What its launcher would say; it must know the accelerator when it is imported.
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_SIZE": size}
        os.environ["DS_ACCELERATOR"] = "cpu"
        deepspeed: Any = importlib.import_module("deepspeed")
        deepspeed.utils.logger.setLevel(logging.ERROR)
        # It replaces torch's linear operator for all models of the process, and for good.
        with _linear(functional.linear):
            engine, *_ = deepspeed.initialize(
                model=self.model, optimizer=optimizer, dist_init_required=False, config=_CONFIG
            )
            self.linear = functional.linear
        # Not a child: its parameters are the model's.
        object.__setattr__(self, "engine", engine)
        return _EngineOptimizer(engine)

    def forward(self, **batch: Tensor) -> Any:
        """Runs the engine's forward, which gathers parameters."""
        return self.engine(**batch)


@contextmanager
def _linear(operator: Callable[..., Tensor]) -> Iterator[None]:
    """Have ``torch.nn.functional.linear`` be ``operator``, and afterwards what it was before."""
    before = functional.linear
    functional.linear = operator
    try:
        yield
    finally:
        functional.linear = before


class _EngineOptimizer(Optimizer):
    """Steps the engine; its groups, of which a schedule sets learning rates, are the engine's."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.optimizer.param_groups, {})
        self._engine = engine

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the parameters from what backward has left, and forget the gradients."""
        assert closure is None
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: ``step`` has."""
