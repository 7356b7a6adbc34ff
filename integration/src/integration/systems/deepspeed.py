"""DeepSpeed's ZeRO-3: its engine shards parameters, gradients and optimizer states.

It is imported on use and need not be installed for the other systems.
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
from integration.device import Device
from integration.errors import UsageError
from integration.models import ModelShape, loss_of
from integration.systems.base import System

_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,  # only for its reports
    "managed_gradient_accumulation": False,  # the training loop accumulates
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,  # torch's fused AdamW, as under every system
    "gradient_clipping": 0.0,  # its default is 1
}


class ZeroThree(System):
    """``deepspeed.initialize`` with stage 3, its defaults, and torch's optimizer inside."""

    name = "deepspeed"
    supports_checkpoints = False

    @property
    def missing(self) -> str | None:
        """Whether it is missing, and the command to install it."""
        if importlib.util.find_spec("deepspeed") is not None:
            return None
        return "not installed: pip install --no-deps deepspeed hjson einops msgpack"

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Refuses a device that DeepSpeed does not know."""
        del world_size, shape
        if self.device.is_simulated:
            raise UsageError(
                "system 'deepspeed': expected --device cpu or cuda, got sim; give another --device"
            )

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Returns a model whose engine is created with the optimizer."""
        del shape, world_size
        return EngineModel(model, self.device)

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Creates the engine, which shards the model and the optimizer; returns its optimizer."""
        assert isinstance(model, EngineModel)
        return model.start(optimizer)

    def forward_backward(
        self, model: nn.Module, batch: Batch, *, parts: int, last: bool, scale: float = 1.0
    ) -> Tensor:
        """Runs forward and backward by the engine, which reduces gradients in each microbatch."""
        del last
        assert isinstance(model, EngineModel)
        assert scale == 1.0
        # With the engine's linear operator, which does not save gathered weights for backward.
        with _linear(model.linear):
            loss = loss_of(model(**batch)) / parts
            model.engine.backward(loss)
        return loss.detach()


class EngineModel(nn.Module):
    """A model with the engine that runs it, which is created with the optimizer."""

    engine: Any = None
    linear: Callable[..., Tensor]

    def __init__(self, model: nn.Module, device: Device) -> None:
        super().__init__()
        self.model = model
        self._device = device

    def start(self, optimizer: Optimizer) -> Optimizer:
        """Creates the engine; returns an optimizer whose step is the engine's."""
        # As its launcher sets them; the accelerator must be set before the import.
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        local = str(self._device.current.index) if self._device.is_accelerator else rank
        os.environ |= {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_SIZE": size}
        os.environ["DS_ACCELERATOR"] = self._device.type
        deepspeed: Any = importlib.import_module("deepspeed")
        deepspeed.utils.logger.setLevel(logging.ERROR)
        # It replaces torch's linear operator for the whole process; the context restores it.
        with _linear(functional.linear):
            engine, *_ = deepspeed.initialize(
                model=self.model, optimizer=optimizer, dist_init_required=False, config=_CONFIG
            )
            self.linear = functional.linear
        # Not registered as a submodule, as its parameters are the model's.
        object.__setattr__(self, "engine", engine)
        return _EngineOptimizer(engine)

    def forward(self, **batch: Tensor) -> Any:
        """Runs the engine's forward, which gathers parameters."""
        return self.engine(**batch)


@contextmanager
def _linear(operator: Callable[..., Tensor]) -> Iterator[None]:
    """Replaces ``torch.nn.functional.linear`` by ``operator`` within the context."""
    before = functional.linear
    functional.linear = operator
    try:
        yield
    finally:
        functional.linear = before


class _EngineOptimizer(Optimizer):
    """An optimizer that steps the engine; its parameter groups are the engine's."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.optimizer.param_groups, {})
        self._engine = engine

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the parameters and frees the gradients."""
        assert closure is None
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing, as ``step`` has freed the gradients."""
