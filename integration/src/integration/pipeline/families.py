"""The inputs, outputs, forward and loss of pipeline stages, by family of models.

The model's class is not changed. Where layers pass one tensor on, a stage runs the class's own
forward (`DecoderFamily`); where they pass on a second one, the stage runs its lines of that forward
(`DiffusionFamily`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from integration.errors import UsageError
from integration.models.dit import signal_rate
from integration.pipeline.split import Chain, PassThrough

_EMBEDDERS = ("x_embedder", "t_embedder", "y_embedder")


class ModelFamily(ABC):
    """Models that are split into stages in the same way."""

    @abstractmethod
    def chain(self, model: nn.Module) -> Chain:
        """Returns the names of a model's units.

        Raises:
            UsageError: its loss needs more than the output of the last stage.
        """

    @abstractmethod
    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Returns the inputs of the first stage, each with the batch as first dim."""

    @abstractmethod
    def target(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the target of the loss, with the batch as first dim."""

    @abstractmethod
    def forward_of(self, part: nn.Module) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        """Returns the forward of a stage's part of a model.

        The part has `PassThrough` in place of the units of other stages. The first stage calls the
        forward with `inputs`, the others with the outputs of the previous stage.
        """

    @abstractmethod
    def loss(self, part: nn.Module, output: Tensor, target: Tensor) -> Tensor:
        """Returns the mean loss of the last stage's output, as the unsplit model does."""


class DecoderFamily(ModelFamily):
    """Hugging Face's decoders: LLaMA, Mixtral and similar ones."""

    def chain(self, model: nn.Module) -> Chain:
        """Returns embedding, layers, norm and head."""
        config: Any = model.config
        if getattr(config, "output_router_logits", False):
            raise UsageError(
                "output_router_logits = True adds a loss of all layers' routers, which the last"
                " stage of a pipeline does not have; set it to False, or use --pp-degree 1"
            )
        layers = tuple(f"model.layers.{index}" for index in range(config.num_hidden_layers))
        return Chain(("model.embed_tokens",), layers, ("model.norm", "lm_head"))

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Returns the tokens, (batch, sequence) int64."""
        return (batch["input_ids"],)

    def target(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the labels, (batch, sequence) int64."""
        return batch["labels"]

    def forward_of(self, part: nn.Module) -> Callable[..., Tensor]:
        """Returns the forward from tokens or hidden states to logits, or to hidden states."""
        model: Any = part

        def forward(input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
            # Arguments are named as in the class's forward, as plans refer to them.
            del labels
            if isinstance(model.lm_head, PassThrough):
                # The class's forward returns a view, which zero-bubble schedules cannot detach in
                # place.
                hidden: Tensor = model.lm_head(model.model(input_ids=input_ids).last_hidden_state)
                return _plain(hidden)
            logits: Tensor = type(model).forward(model, input_ids=input_ids).logits
            return _plain(logits)

        return forward

    def loss(self, part: nn.Module, output: Tensor, target: Tensor) -> Tensor:
        """Returns the mean cross entropy of the next tokens."""
        model: Any = part
        loss: Tensor = model.loss_function(
            logits=output, labels=target, vocab_size=model.config.vocab_size
        )
        return loss


class DiffusionFamily(ModelFamily):
    """DiTs with the loss of predicted noise; stages also pass on the condition of the blocks."""

    def chain(self, model: nn.Module) -> Chain:
        """Returns the embedders, the blocks and the final layer."""
        blocks = model.get_submodule("model.blocks")
        names = tuple(f"model.blocks.{name}" for name, _ in blocks.named_children())
        return Chain(tuple(f"model.{name}" for name in _EMBEDDERS), names, ("model.final_layer",))

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Returns images and noise (batch, channels, size, size), times and classes (batch,)."""
        return batch["x"], batch["noise"], batch["t"], batch["y"]

    def target(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the noise."""
        return batch["noise"]

    def forward_of(self, part: nn.Module) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        """Returns the forward to the predicted noise, or to tokens and condition."""
        model: Any = part.model

        def forward(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
            if isinstance(model.x_embedder, PassThrough):
                tokens, condition = inputs
            else:
                images, noise, times, classes = inputs
                signal = signal_rate(times).view(-1, 1, 1, 1)
                tokens = model.x_embedder(signal * images + (1 - signal**2).sqrt() * noise)
                tokens = tokens + model.pos_embed
                condition = model.t_embedder(times) + model.y_embedder(classes, model.training)
            for block in model.blocks:
                tokens = block(tokens, condition)
            if isinstance(model.final_layer, PassThrough):
                # Tensors are sent contiguous, and must be results of this stage for a backward of
                # inputs only.
                return tokens.contiguous(), condition.clone()
            predicted: Tensor = model._unpatchify(model.final_layer(tokens, condition))
            return predicted

        return forward

    def loss(self, part: nn.Module, output: Tensor, target: Tensor) -> Tensor:
        """Returns the mean squared error."""
        model: Any = part
        loss: Tensor = model.criterion(output, target)
        return loss


def family_of(model: nn.Module) -> ModelFamily:
    """Returns the family of a model.

    Raises:
        UsageError: the model belongs to none.
    """
    names = {name for name, _ in model.named_modules()}
    if {"model.embed_tokens", "model.layers", "model.norm", "lm_head"} <= names:
        return DecoderFamily()
    if {f"model.{name}" for name in (*_EMBEDDERS, "blocks", "final_layer")} <= names:
        return DiffusionFamily()
    raise UsageError(
        "pipeline: expected a Hugging Face decoder (model.embed_tokens, model.layers, model.norm,"
        f" lm_head) or a DiT, got {type(model).__name__}; use --pp-degree 1"
    )


def _plain(tensor: Tensor) -> Tensor:
    """Returns a plain tensor for the next stage or the loss; plans leave replicated DTensors.

    It is a copy, as zero-bubble schedules detach a stage's outputs in place, which views forbid.
    """
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor
