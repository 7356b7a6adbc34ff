"""What a stage is given, what it hands on, and the loss, by kind of model.

The model's class is not changed. Where layers pass one tensor on, a stage runs the class's own
forward (`DecoderFamily`); where they pass on a second one, the stage runs its lines of that forward
(`DiffusionFamily`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from integration.errors import UsageError
from integration.pipeline.chain import Chain
from integration.pipeline.model_part import PassThrough

_EMBEDDERS = ("x_embedder", "t_embedder", "y_embedder")


class ModelFamily(ABC):
    """Models that are cut in the same way."""

    @abstractmethod
    def chain(self, model: nn.Module) -> Chain:
        """Return the names of a model's units.

        Raises:
            UsageError: its loss needs more than what the last stage has.
        """

    @abstractmethod
    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return what the first stage is given, each tensor with the batch first."""

    @abstractmethod
    def target(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what the last stage compares its output with, the batch first."""

    @abstractmethod
    def forward_of(self, part: nn.Module) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        """Returns the forward of a stage's part of a model.

        The part has `PassThrough` in place of the units of other stages. The first stage calls the
        forward with `inputs`, the others with the outputs of the previous stage.
        """

    @abstractmethod
    def loss(self, part: nn.Module, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of what the last part returned, as the whole model does."""


class DecoderFamily(ModelFamily):
    """Hugging Face's decoders of tokens: LLaMA, Mixtral and their relatives."""

    def chain(self, model: nn.Module) -> Chain:
        """Return the embedding, the layers, norm and head."""
        config: Any = model.config
        if getattr(config, "output_router_logits", False):
            raise UsageError(
                "output_router_logits = True adds a loss of all layers' routers, which the last"
                " stage of a pipeline does not have; set it to False, or use --pp-degree 1"
            )
        layers = tuple(f"model.layers.{index}" for index in range(config.num_hidden_layers))
        return Chain(("model.embed_tokens",), layers, ("model.norm", "lm_head"))

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the tokens, (batch, sequence) int64."""
        return (batch["input_ids"],)

    def target(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the labels, (batch, sequence) int64."""
        return batch["labels"]

    def forward_of(self, part: nn.Module) -> Callable[..., Tensor]:
        """Tokens or hidden states to logits, or to hidden states where the head is absent."""
        model: Any = part

        def forward(input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
            # With the names of the class's forward, for plans say what becomes of them.
            del labels
            if isinstance(model.lm_head, PassThrough):
                # Not by the class's forward, which returns a view: zero-bubble schedules detach
                # what a stage returns in place.
                hidden: Tensor = model.lm_head(model.model(input_ids=input_ids).last_hidden_state)
                return _plain(hidden)
            logits: Tensor = type(model).forward(model, input_ids=input_ids).logits
            return _plain(logits)

        return forward

    def loss(self, part: nn.Module, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy of the next tokens."""
        model: Any = part
        loss: Tensor = model.loss_function(
            logits=output, labels=target, vocab_size=model.config.vocab_size
        )
        return loss


class DiffusionFamily(ModelFamily):
    """DiTs in the loss of predicted noise; blocks take the condition too, so stages hand it on."""

    def chain(self, model: nn.Module) -> Chain:
        """Return the embedders, the blocks and the final layer."""
        blocks = model.get_submodule("model.blocks")
        names = tuple(f"model.blocks.{name}" for name, _ in blocks.named_children())
        return Chain(tuple(f"model.{name}" for name in _EMBEDDERS), names, ("model.final_layer",))

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return images and noise (batch, channels, size, size), times and classes (batch,)."""
        return batch["x"], batch["noise"], batch["t"], batch["y"]

    def target(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the noise."""
        return batch["noise"]

    def forward_of(self, part: nn.Module) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        """To the predicted noise, or to tokens and condition where the final layer is absent."""
        model: Any = part.model

        def forward(*given: Tensor) -> Tensor | tuple[Tensor, ...]:
            if isinstance(model.x_embedder, PassThrough):
                tokens, condition = given
            else:
                images, noise, times, classes = given
                kept = torch.cos(times / 1000 * math.pi / 2).view(-1, 1, 1, 1)
                tokens = model.x_embedder(kept * images + (1 - kept**2).sqrt() * noise)
                tokens = tokens + model.pos_embed
                condition = model.t_embedder(times) + model.y_embedder(classes, model.training)
            for block in model.blocks:
                tokens = block(tokens, condition)
            if isinstance(model.final_layer, PassThrough):
                # What is sent lies in one piece; and is made here, which torch looks for when it
                # takes the gradients of inputs alone.
                return tokens.contiguous(), condition.clone()
            predicted: Tensor = model._unpatchify(model.final_layer(tokens, condition))
            return predicted

        return forward

    def loss(self, part: nn.Module, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error."""
        model: Any = part
        loss: Tensor = model.criterion(output, target)
        return loss


def family_of(model: nn.Module) -> ModelFamily:
    """Return how a model is cut.

    Raises:
        UsageError: nobody knows.
    """
    names = {name for name, _ in model.named_modules()}
    if {"model.embed_tokens", "model.layers", "model.norm", "lm_head"} <= names:
        return DecoderFamily()
    if {f"model.{name}" for name in (*_EMBEDDERS, "blocks", "final_layer")} <= names:
        return DiffusionFamily()
    raise UsageError(
        f"a pipeline cannot cut {type(model).__name__}: it knows Hugging Face's decoders"
        " (model.embed_tokens, model.layers, model.norm, lm_head) and testkit's DiT; use"
        " --pp-degree 1"
    )


def _plain(tensor: Tensor) -> Tensor:
    """Between stages, and in the loss, tensors are plain: a plan leaves whole DTensors there.

    Copies of them: zero-bubble schedules detach what a stage returns in place, and no view can be.
    """
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor
