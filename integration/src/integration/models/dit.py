"""A diffusion transformer for images of handwritten digits, and its loss.

DiT of Peebles and Xie, "Scalable Diffusion Models with Transformers" (arXiv 2212.09748), section 3:
adaLN-Zero blocks between a patch embedding and a linear decoder. Modules have the names of the
authors' own code (https://github.com/facebookresearch/DiT, models.py), so that `plan_api.zoo.dit`
fits both. The model is written for one device.
"""

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from integration.data import Modality
from integration.data.digits import CHANNELS, CLASSES, SIDE
from integration.models.shape import ModelShape


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Shifts and scales (batch, tokens, width) by vectors (batch, width)."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class PatchEmbed(nn.Module):
    """Embeds images (batch, channels, size, size) as tokens (batch, tokens, width)."""

    def __init__(self, patch_size: int, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch_size, patch_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of patches, row by row."""
        embedded: torch.Tensor = self.proj(x)
        return embedded.flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    """Embeds times (batch,) as (batch, width), by sines and cosines and an MLP."""

    def __init__(self, width: int, frequencies: int = 16) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of times in [0, 1000]."""
        half = self.frequencies // 2
        periods = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
        angles = t[:, None].float() * periods[None]
        embedded: torch.Tensor = self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))
        return embedded


class LabelEmbedder(nn.Module):
    """Embeds classes (batch,) as (batch, width); training replaces some by "no class"."""

    def __init__(self, classes: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(classes + 1, width)
        self.classes, self.dropout = classes, dropout

    def forward(self, labels: torch.Tensor, train: bool) -> torch.Tensor:
        """Returns the embeddings of classes; ``train``: drops some of them."""
        if train and self.dropout > 0:
            dropped = torch.rand(labels.shape[0], device=labels.device) < self.dropout
            labels = torch.where(dropped, self.classes, labels)
        embedded: torch.Tensor = self.embedding_table(labels)
        return embedded


class SelfAttention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns (batch, tokens, width)."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        x = self.proj(x.transpose(1, 2).reshape(batch, tokens, width))
        dropped: torch.Tensor = self.proj_drop(x)
        return dropped


class FeedForward(nn.Module):
    """Two linear layers with GELU and dropout."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1, self.act = nn.Linear(width, hidden), nn.GELU(approximate="tanh")
        self.drop1 = nn.Dropout(dropout)
        self.fc2, self.drop2 = nn.Linear(hidden, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns (batch, tokens, width)."""
        x = self.drop1(self.act(self.fc1(x)))
        dropped: torch.Tensor = self.drop2(self.fc2(x))
        return dropped


class DiTBlock(nn.Module):
    """Attention and an MLP, each normalized, modulated and gated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = SelfAttention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = FeedForward(width, 4 * width, dropout)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """Takes and returns (batch, tokens, width), with the condition (batch, width)."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, 1)
        x = x + gate.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift, scale))
        gated: torch.Tensor = gate_mlp.unsqueeze(1) * self.mlp(
            modulate(self.norm2(x), shift_mlp, scale_mlp)
        )
        return x + gated


class FinalLayer(nn.Module):
    """Decodes tokens (batch, tokens, width) to patches (batch, tokens, patch)."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, patch)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """Takes (batch, tokens, width) and the condition (batch, width)."""
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        patches: torch.Tensor = self.linear(modulate(self.norm_final(x), shift, scale))
        return patches


class DiT(nn.Module):
    """Predicts the noise in images, from the images, times and classes.

    Args:
        input_size: height and width of images.
        patch_size: height and width of a patch, which is a token.
        in_channels: channels of images.
        hidden_size: width of tokens.
        depth: number of blocks.
        num_heads: attention heads of a block.
        num_classes: number of classes, without "no class".
        class_dropout_prob: probability of replacing a class by "no class" in training.
        dropout: dropout probability after the linear layers of blocks.
    """

    def __init__(
        self, *, input_size: int = 8, patch_size: int = 2, in_channels: int = 4,
        hidden_size: int = 32, depth: int = 2, num_heads: int = 4, num_classes: int = 10,
        class_dropout_prob: float = 0.1, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patch_size, self.channels = patch_size, in_channels
        side = input_size // patch_size
        self.x_embedder = PatchEmbed(patch_size, in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size, class_dropout_prob)
        self.pos_embed = nn.Parameter(_positions(side, hidden_size), requires_grad=False)
        self.blocks = nn.ModuleList(DiTBlock(hidden_size, num_heads, dropout) for _ in range(depth))
        self.final_layer = FinalLayer(hidden_size, patch_size**2 * in_channels)
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """Draws all parameters but the position embeddings; the gates of blocks are zero."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        for name, param in self.named_parameters():
            if "adaLN_modulation" in name or name.startswith("final_layer.linear"):
                nn.init.zeros_(param)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Predicts the noise in images (batch, channels, size, size), at times and of classes."""
        x = self.x_embedder(x) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y, self.training)
        for block in self.blocks:
            x = block(x, c)
        return self._unpatchify(self.final_layer(x, c))

    def _unpatchify(self, x: torch.Tensor) -> torch.Tensor:
        side, patch = math.isqrt(x.shape[1]), self.patch_size
        x = x.reshape(x.shape[0], side, side, patch, patch, self.channels)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(x.shape[0], self.channels, side * patch, side * patch)


def signal_rate(t: torch.Tensor) -> torch.Tensor:
    """Returns the factor of the image in a noisy one at times in [0, 1000]: cosine from 1 to 0."""
    return torch.cos(t / 1000 * math.pi / 2)


class DiffusionLoss(nn.Module):
    """A diffusion model with its training loss, the mean squared error of the predicted noise.

    Args:
        model: predicts the noise from noisy images, times and classes.
    """

    def __init__(self, model: DiT) -> None:
        super().__init__()
        self.model, self.criterion = model, nn.MSELoss()

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """Returns the loss of images, times, classes, and the noise to add to the images."""
        rate = signal_rate(t).view(-1, 1, 1, 1)
        noisy = rate * x + (1 - rate**2).sqrt() * noise
        loss: torch.Tensor = self.criterion(self.model(noisy, t, y), noise)
        return loss


def _positions(side: int, width: int) -> torch.Tensor:
    """Returns sines and cosines of rows and columns, (1, side * side, width)."""
    quarter = width // 4
    rates = 10000 ** -(torch.arange(quarter) / quarter)
    angles = torch.arange(side)[:, None] * rates
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = waves[:, None].expand(side, side, width // 2)
    columns = waves[None].expand(side, side, width // 2)
    return torch.cat([rows, columns], dim=-1).reshape(1, side * side, width)


@dataclass(frozen=True)
class DiTShape(ModelShape):
    """Sizes of a `DiT` with the loss of predicted noise."""

    family: ClassVar[str] = "dit"
    modality: ClassVar[Modality] = Modality.DIGITS
    layers: ClassVar[str] = "model.blocks"
    tensor_parallel_sizes: ClassVar[tuple[str, ...]] = ("num_heads",)
    loss_unit: ClassVar[str] = "squared error per pixel"
    # Position embeddings are computed when the model is constructed.
    can_reinitialize: ClassVar[bool] = False

    hidden_size: int
    depth: int
    num_heads: int
    patch_size: int = 2

    @property
    def patches(self) -> int:
        """Number of patches of an image, which are the sequence."""
        return (SIDE // self.patch_size) ** 2

    def build(self, *, dropout: float) -> nn.Module:
        """Returns the model with its loss; ``dropout`` follows the linear layers of blocks.

        The data drops classes, not the model, so that all ranks drop the same ones.
        """
        model = DiT(
            **asdict(self),
            input_size=SIDE,
            in_channels=CHANNELS,
            num_classes=CLASSES,
            class_dropout_prob=0.0,
            dropout=dropout,
        )
        return DiffusionLoss(model).train()


DITS: dict[str, DiTShape] = {
    # 3.4 M parameters.
    "dit-3m": DiTShape(hidden_size=192, depth=5, num_heads=6),
    # 0.2 M parameters: learns to draw digits within a minute on one core.
    "dit-small": DiTShape(hidden_size=64, depth=3, num_heads=4),
    # 0.1 M parameters, for tests.
    "dit-tiny": DiTShape(hidden_size=32, depth=2, num_heads=4),
}
