"""A model and a plan of one's own for the trainer.

From this folder, on one device and on four ranks, with the same losses:

    python -m integration.train --model own_model:model --out /tmp/one
    python -m integration.train --model own_model:model --out /tmp/four --ranks 4 \
        --system plan --plan own_model:plan --dp-replicate 2 --tp 2
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from integration.models import ModelShape
from integration.systems import Degrees
from plan_api import Plan


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.dropout = width // heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns (batch, tokens, width)."""
        normed = self.norm1(x)
        q, k, v = (
            projection(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """A decoder that returns its loss; its arguments are the tensors of a batch."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of predicting (batch, tokens) from the tokens before."""
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


@dataclass(frozen=True)
class OwnShape(ModelShape):
    """Sizes of a `Decoder`; checkpoints belong to runs with the same ones."""

    family: ClassVar[str] = "own"
    layers: ClassVar[str] = "blocks"
    tensor_parallel_sizes: ClassVar[tuple[str, ...]] = ("heads",)
    # It has no init_weights, with which --init sharded would draw weights of a model on meta.
    can_reinitialize: ClassVar[bool] = False

    width: int = 32
    heads: int = 4
    depth: int = 2
    vocab_size: int = 256

    def build(self, *, dropout: float) -> nn.Module:
        """Returns the model."""
        return Decoder(self.vocab_size, self.width, self.heads, self.depth, dropout).train()


def model() -> OwnShape:
    """The function for ``--model``."""
    return OwnShape()


def plan(mesh: DeviceMesh, shape: OwnShape, degrees: Degrees) -> Plan:
    """The function for ``--plan``: data and tensor parallelism, by the axes that the mesh has."""
    del shape, degrees
    made, axes = Plan(mesh), mesh.mesh_dim_names or ()
    batch = [Shard(0) if axis == "dp" else Replicate() for axis in axes]
    made.shard("<in:input_ids>", batch).shard("<in:labels>", batch)
    if "tp" in axes:
        made.shard(r"blocks\.\d+\.(query|key|value)\.(weight|bias)", Shard(0), "tp")
        made.shard(r"blocks\.\d+\.up\.(weight|bias)", Shard(0), "tp")
        made.shard(r"blocks\.\d+\.(out|down)\.weight", Shard(1), "tp")
        made.shard(r"blocks\.\d+\.(out|down).<out>", Replicate(), "tp")
        made.redistribute(
            r"blocks\.\d+\.norm[12].<out>", Replicate(), Replicate(), "tp",
            grad_src=Partial(), grad_dst=Replicate(),
        )  # fmt: skip
    return made.shard("<out>", [Replicate() for _ in axes])
