"""What every model says of itself: its sizes, its data, and where its repeated layers are."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from integration.data import Modality


@dataclass(frozen=True)
class ModelShape(ABC):
    """What decides a model's parameters; a frozen dataclass of sizes.

    Attributes:
        family: models of one family take the same plans.
        modality: what its batches are made of.
        layers: path of the list of its repeated layers.
        tensor_parallel_sizes: fields that tensor parallel ranks have to divide.
        loss_unit: of what its loss counts.
        tolerance: the largest difference of a loss from one device's that rounding explains,
            within tens of steps.
        redraws: whether its initialiser draws all parameters of a model that is there already.
    """

    family: ClassVar[str]
    modality: ClassVar[Modality] = Modality.TEXT
    layers: ClassVar[str] = "model.layers"
    tensor_parallel_sizes: ClassVar[tuple[str, ...]]
    loss_unit: ClassVar[str] = "nats per token"
    tolerance: ClassVar[float] = 1e-5
    can_reinitialize: ClassVar[bool] = True

    def layers_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the repeated layers of a model of this shape, in order."""
        return list(model.get_submodule(self.layers).children())

    @abstractmethod
    def build(self, *, dropout: float) -> nn.Module:
        """Return the model for one device, in fp32, drawn from torch's generator.

        It is called with a batch's tensors by name, and returns its mean loss, or an object whose
        ``loss`` that is.

        Args:
            dropout: probability of a zero where the model drops out.
        """


def loss_of(output: Tensor | object) -> Tensor:
    """Return the loss in what a model returned."""
    if isinstance(output, Tensor):
        return output
    loss: Tensor = output.loss  # type: ignore[attr-defined]  # Hugging Face's
    return loss
