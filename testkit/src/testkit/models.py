"""Small models that know nothing of meshes, and a script for one device that trains them.

transformers is imported where it is used: testkit does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from testkit.dit import Diffusion, DiT

__all__ = ["dit", "gpt2", "llama", "mixtral", "reinitialize", "token_loss", "train", "vit"]

VOCABULARY = 64


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
    """Draws all parameters anew as the model itself does, wherever they are by now."""
    torch.manual_seed(seed)
    if isinstance(model, Diffusion):
        model.model.initialize_weights()
        return
    own: Any = model._init_weights  # transformers'
    for module in model.modules():
        if not dict(module.named_buffers(recurse=False)):  # they are not drawn
            own(module)


def token_loss(model: Any) -> torch.Tensor:
    """The loss of a batch of 4 random sequences of 8 tokens, the last one padded."""
    ids = torch.randint(0, VOCABULARY, (4, 8))
    labels = ids.clone()
    labels[-1, 3:] = -100
    loss: torch.Tensor = model(input_ids=ids, labels=labels).loss
    return loss


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
