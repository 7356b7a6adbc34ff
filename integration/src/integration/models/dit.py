"""A diffusion transformer for images of handwritten digits: testkit's DiT."""

from dataclasses import asdict, dataclass
from typing import ClassVar

from torch import nn

from integration.data import Modality
from integration.data.digits import CHANNELS, CLASSES, SIDE
from integration.models.shape import ModelShape


@dataclass(frozen=True)
class DiTShape(ModelShape):
    """Sizes of a ``testkit.models.diffusion.DiT`` with the loss of predicted noise."""

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

    def build(self, *, dropout: float) -> nn.Module:
        """Returns the model with its loss; ``dropout`` follows the linear layers of blocks.

        The data drops classes, not the model, so that all ranks drop the same ones.
        """
        from testkit.models.diffusion import DiffusionLoss, DiT

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
