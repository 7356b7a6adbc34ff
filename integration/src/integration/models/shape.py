"""The interface of model shapes: sizes, training data, and the repeated layers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from integration.data import Modality
from integration.errors import UsageError


@dataclass(frozen=True)
class ModelShape(ABC):
    """The sizes that determine a model's parameters, as a frozen dataclass.

    Attributes:
        family: models of one family have the same plans.
        modality: kind of training data.
        layers: path of the list of repeated layers.
        tensor_parallel_sizes: fields that must be divisible by the tensor parallel degree, except
            in static mode.
        loss_unit: unit of the loss.
        tolerance: largest difference of a loss from one device's that rounding explains within
            tens of steps.
        can_reinitialize: whether the model's initialiser can draw all parameters of an existing
            model.
        limits_attention: whether attention can be limited to documents, by positions that restart
            with each.
    """

    family: ClassVar[str]
    modality: ClassVar[Modality] = Modality.TEXT
    layers: ClassVar[str] = "model.layers"
    tensor_parallel_sizes: ClassVar[tuple[str, ...]]
    loss_unit: ClassVar[str] = "nats per token"
    tolerance: ClassVar[float] = 1e-5
    can_reinitialize: ClassVar[bool] = True
    limits_attention: ClassVar[bool] = False

    def layers_of(self, model: nn.Module) -> list[nn.Module]:
        """Returns the repeated layers of a model of this shape, in order."""
        return list(model.get_submodule(self.layers).children())

    def with_vocabulary(self, size: int) -> "ModelShape":
        """Returns the shape for a tokenizer of ``size`` tokens, by default itself.

        Raises:
            UsageError: it has fewer tokens.
        """
        found: int = getattr(self, "vocab_size", size)
        if found < size:
            raise UsageError(
                f"--tokenizer: expected at most the model's vocab_size = {found} tokens, got"
                f" {size}; give another tokenizer or --model"
            )
        return self

    @property
    def has_routers(self) -> bool:
        """Whether tokens choose experts by transformers' routers."""
        return False

    @property
    def has_expert_biases(self) -> bool:
        """Whether these routers have ``e_score_correction_bias``, as DeepSeek-V3's."""
        return False

    @property
    def has_router_loss(self) -> bool:
        """Whether the model's loss has the auxiliary loss of its routers in it."""
        return False

    @abstractmethod
    def build(self, *, dropout: float) -> nn.Module:
        """Returns the model for one device, in fp32, with weights from torch's generator.

        Its forward takes the tensors of a batch by name and returns the mean loss, or an object
        with an attribute ``loss``.

        Args:
            dropout: dropout probability.
        """


def loss_of(output: Tensor | object) -> Tensor:
    """Returns the loss in the output of a model."""
    if isinstance(output, Tensor):
        return output
    loss: Tensor = output.loss  # type: ignore[attr-defined]  # Hugging Face's
    return loss
