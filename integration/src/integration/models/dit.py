"""A diffusion transformer of images of handwritten digits; the model is testkit's DiT."""

from dataclasses import asdict, dataclass
from typing import ClassVar

from torch import nn

from integration.data import Modality
from integration.data.digits import CHANNELS, CLASSES, SIDE
from integration.models.shape import ModelShape


@dataclass(frozen=True)
class DiTShape(ModelShape):
    """Sizes of a ``testkit.models.diffusion.DiT``, which the loss of predicted noise contains."""

    family: ClassVar[str] = "dit"
    modality: ClassVar[Modality] = Modality.DIGITS
    layers: ClassVar[str] = "model.blocks"
    tensor_parallel_sizes: ClassVar[tuple[str, ...]] = ("num_heads",)
    loss_unit: ClassVar[str] = "squared error per pixel"
    # Positions are computed where the model is made.
    can_reinitialize: ClassVar[bool] = False

    hidden_size: int
    depth: int
    num_heads: int
    patch_size: int = 2

    def build(self, *, dropout: float) -> nn.Module:
        """Return the model with its loss; ``dropout`` is behind the linear layers of blocks.

        Which images lose their class is the data's to say, so that it is the same on all ranks.
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
