"""Small models that know nothing of meshes, and a script for one device that trains them.

transformers is imported where it is used: testkit does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from testkit.dit import Diffusion, DiT

__all__ = [
    "Training", "TwoLinears", "dit", "gpt2", "image_loss", "llama", "mixtral", "noise_loss",
    "nowhere_zero", "reinitialize", "token_loss", "train", "vit", "with_noise_loss",
]  # fmt: skip

VOCABULARY = 64


class TwoLinears(nn.Module):
    """4 features to 8 and back, and a loss of them; always the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of what comes out."""
        y: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return y.square().mean()


def llama(**changes: Any) -> nn.Module:
    """LLaMA of transformers: 2 layers of 32 features, 4 heads, 2 key-value heads.

    Args:
        changes: to its config.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "use_cache": False, "attn_implementation": "eager",
    }  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**options | changes))
    return model.train()


def mixtral(**changes: Any) -> nn.Module:
    """Mixtral of transformers: 2 layers of 32 features, 4 heads, 2 of 4 experts of 48 features.

    Args:
        changes: to its config.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    options: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
        "use_cache": False, "attn_implementation": "eager",
    }  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = MixtralForCausalLM(MixtralConfig(**options | changes))
    return model.train()


def gpt2(**changes: Any) -> nn.Module:
    """GPT-2 of transformers: 2 layers of 32 features, 4 heads, dropout everywhere, tied embeddings.

    Args:
        changes: to its config.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    options: dict[str, Any] = {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY,
        "use_cache": False, "attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 1,
        "loss_type": "ForCausalLM",
    }  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**options | changes))
    return model.train()


def vit(**changes: Any) -> nn.Module:
    """ViT of transformers for 10 classes: 2 layers of 32 features, 4 heads, images of 3 x 16 x 16.

    Args:
        changes: to its config.
    """
    from transformers import ViTConfig, ViTForImageClassification

    options: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_labels": 10,
        "hidden_dropout_prob": 0.1, "attn_implementation": "sdpa",
    }  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = ViTForImageClassification(ViTConfig(**options | changes))
    return model.train()


def dit(**changes: Any) -> Diffusion:
    """`testkit.dit.DiT` and its loss: 2 blocks of 32 features, 4 heads, 4 x 8 x 8, dropout.

    Args:
        changes: to its arguments.
    """
    options: dict[str, Any] = {
        "input_size": 8, "hidden_size": 32, "depth": 2, "num_heads": 4, "num_classes": 10,
        "dropout": 0.1,
    }  # fmt: skip
    torch.manual_seed(0)
    return Diffusion(DiT(**options | changes)).train()


def reinitialize(model: nn.Module, seed: int = 1) -> None:
    """Draws all parameters again, as the model itself does, wherever they are by now."""
    torch.manual_seed(seed)
    if isinstance(model, Diffusion):
        model.model.initialize_weights()
        return
    own: Any = model._init_weights  # transformers'
    for module in model.modules():
        if not dict(module.named_buffers(recurse=False)):  # they are not drawn
            own(module)


def nowhere_zero(model: nn.Module) -> nn.Module:
    """Draws all parameters: biases and DiT's gates begin at zero, and hide what is behind them."""
    torch.manual_seed(5)
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param.data, std=0.05)
    return model


def token_loss(model: Any) -> torch.Tensor:
    """The loss of a batch of 4 random sequences of 8 tokens, the last one padded."""
    ids = torch.randint(0, VOCABULARY, (4, 8))
    labels = ids.clone()
    labels[-1, 3:] = -100
    loss: torch.Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def image_loss(model: Any) -> torch.Tensor:
    """The loss of a ViT on a batch of 4 random images."""
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))
    loss: torch.Tensor = model(pixel_values=images, labels=labels).loss
    return loss


def noise_loss(model: Any) -> torch.Tensor:
    """The loss of a DiT on a batch of 4 random images and their noise."""
    images, noise = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8)
    loss: torch.Tensor = model(
        images, torch.randint(0, 1000, (4,)), torch.randint(0, 10, (4,)), noise
    )
    return loss


def with_noise_loss(plan: Any, *dp: str) -> Any:
    """A plan of a DiT, made one of `dit`, which has its loss beside it.

    Args:
        plan: of plan-api.
        dp: axes along which batches are cut; none: all ranks have the whole batch.
    """
    plan = plan.under("model")
    if not dp:
        plan.redistribute("criterion.<in:target>", Replicate(), Replicate(), plan.axes[0])
    for axis in dp:
        plan.redistribute("criterion.<in:target>", Replicate(), Shard(0), axis)
        plan.annotate("criterion.<op:mse_loss>", Shard(0), axis)
        plan.redistribute("<out>", Partial(), Replicate(), axis)
    return plan


@dataclass(frozen=True)
class Training:
    """A model, its plan, and a script's loss on a batch.

    Attributes:
        make: the model, for one device.
        plan: of a mesh, by ``sp``.
        loss: draws a batch.
        within: of one device's losses.
        sp: with sequence parallelism and without, or without alone.
        axes: of the mesh.
    """

    make: Callable[[], nn.Module]
    plan: Callable[..., Any]
    loss: Callable[[Any], torch.Tensor] = token_loss
    within: float = 1e-5
    sp: tuple[bool, ...] = (False, True)
    axes: tuple[str, str] = ("dp", "tp")


def train(
    model: nn.Module,
    loss_of: Callable[[Any], torch.Tensor] = token_loss,
    *,
    steps: int = 20,
    lr: float = 1e-3,
) -> list[float]:
    """A training script for one device; batches and dropout draw from the one generator.

    Args:
        model: any.
        loss_of: draws a batch and gives the model's loss on it.
        steps: of AdamW.
        lr: its learning rate.

    Returns:
        the loss of each step.
    """
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
