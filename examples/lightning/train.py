"""Lightning Fabric: `ModelParallelStrategy` with fsdp's fully_shard in its ``parallelize_fn``.

Run ``python examples/lightning/train.py --ranks 2 --steps 4``.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as native_fully_shard

import fsdp

sys.path.append(str(Path(__file__).parents[1]))
from side_by_side import main

WIDTH = 256


def make_model() -> nn.Module:
    """Returns four blocks and a head."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))]
    blocks += [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 10))


def train(system: str, steps: int) -> list[float]:
    """Trains on all ranks; returns the losses, means over ranks."""
    fully_shard = fsdp.fully_shard if system == "fsdp" else native_fully_shard

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for block in model.children():
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    ranks = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(make_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(1 + fabric.global_rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, WIDTH, generator=generator)
        labels = torch.randint(10, (16,), generator=generator)
        loss = nn.functional.cross_entropy(model(x), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach())))
    folder = fabric.broadcast(tempfile.mkdtemp())
    fabric.save(folder, {"model": model, "optimizer": optimizer})
    fabric.load(folder, {"model": model, "optimizer": optimizer})
    return losses


if __name__ == "__main__":
    main(train)
