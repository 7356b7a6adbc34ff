"""Lightning: its Trainer and Fabric, with `ModelParallelStrategy` or a strategy of fsdp.

Run ``python examples/lightning/train.py --ranks 2 --steps 4``.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from fsdp.integrations.lightning import FullyShardStrategy, parallelize_fn

sys.path.append(str(Path(__file__).parents[1]))
from side_by_side import TOLERANCE, main

WIDTH = 256
BATCH = 16  # of a rank


class Block(nn.Sequential):
    """A block with a parameter group of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def make_model() -> nn.Module:
    """Returns four blocks and a head."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)], nn.Linear(WIDTH, 10))


def make_data(steps: int, ranks: int) -> TensorDataset:
    """Returns what all ranks train on in some steps."""
    generator, size = torch.Generator().manual_seed(1), steps * ranks * BATCH
    x = torch.randn(size, WIDTH, generator=generator)
    return TensorDataset(x, x[:, :10].argmax(1))


def shard_natively(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Does what `parallelize_fn` does, with torch's fully_shard."""
    for block in (module for module in model.modules() if isinstance(module, Block)):
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


class Module(LightningModule):
    """Trains the model and collects losses; it is the same for all strategies."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses = make_model(), []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        x, labels = batch
        loss = nn.functional.cross_entropy(self.model(x), labels)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


class NativeModule(Module):
    """Is sharded as Lightning's documentation says."""

    def configure_model(self) -> None:
        """Shards the model, once."""
        if not isinstance(next(self.model.parameters()), torch.distributed.tensor.DTensor):
            shard_natively(self.model, self.device_mesh)


def train_with_trainer(system: str, steps: int, ranks: int) -> list[float]:
    """Trains by the Trainer, half of the steps from a checkpoint."""
    losses: list[float] = []
    loader = DataLoader(make_data(steps, ranks), BATCH)
    checkpoint = None
    for last in (steps // 2, steps):
        module = Module() if system == "fsdp" else NativeModule()
        strategy = (
            FullyShardStrategy(Block)  # the one line
            if system == "fsdp"
            else ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=strategy,
            max_steps=last,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader, ckpt_path=checkpoint)
        losses += module.losses
        folder = trainer.strategy.broadcast(tempfile.mkdtemp())
        checkpoint = Path(folder) / "checkpoint"
        trainer.save_checkpoint(checkpoint)
    return losses


def train_with_fabric(system: str, steps: int, ranks: int) -> list[float]:
    """Trains by Fabric, and saves and loads a checkpoint."""
    shard = parallelize_fn(Block) if system == "fsdp" else shard_natively  # the one line
    strategy = FabricStrategy(shard, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for x, labels in fabric.setup_dataloaders(DataLoader(make_data(steps, ranks), BATCH)):
        loss = nn.functional.cross_entropy(model(x), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach())))
    folder = fabric.broadcast(tempfile.mkdtemp())
    fabric.save(folder, {"model": model, "optimizer": optimizer})
    fabric.load(folder, {"model": model, "optimizer": optimizer})
    return losses


def train(system: str, steps: int, case: str) -> list[float]:
    """Trains on all ranks; returns the losses, means over ranks."""
    ranks = int(os.environ["WORLD_SIZE"])
    if case == "fabric":
        return train_with_fabric(system, steps, ranks)
    return train_with_trainer(system, steps, ranks)


if __name__ == "__main__":
    main(train, {"trainer": TOLERANCE, "fabric": TOLERANCE})
