"""Images from a trained DiT: DDIM's deterministic steps, with classifier-free guidance.

Song, Meng and Ermon, "Denoising Diffusion Implicit Models" (arXiv 2010.02502), equation 12 with
sigma 0; Ho and Salimans, "Classifier-Free Diffusion Guidance" (arXiv 2207.12598), equation 6.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from integration.data.digits import CHANNELS, CLASSES, SIDE, TIMES
from integration.errors import UsageError
from integration.models import DiTShape, build_model_on_meta, shape_from
from integration.train import checkpoint
from testkit.models.diffusion import signal_rate

# Images (batch, 1, 8, 8), times and classes (batch,) int64, to the noise in the images.
Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sampling:
    """How images are drawn.

    Raises:
        UsageError: a number does not do.
    """

    steps: int = 50
    """Evaluations of the model on the way from noise to an image."""
    guidance: float = 2.0
    """How far to go from what the model predicts without a class, 0, to what it does with one, 1,
    and beyond, where images are more typical of their class and more alike."""
    seed: int = 0
    """Of the noise that images begin as."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 1 <= self.steps < TIMES:
            raise UsageError(
                f"{self.steps} sampling steps were given; give from 1 to {TIMES - 1}, as a model"
                f" knows {TIMES} times"
            )
        if not 0 <= self.guidance < float("inf"):
            raise UsageError(f"guidance is {self.guidance}; give a finite number, 0 or above")
        if self.seed < 0:
            raise UsageError(f"the seed is {self.seed}; give 0 or above")


def digits_in_turn(samples: int) -> Tensor:
    """Return the classes 0 to 9, as often one after another: rows of a grid, (samples * 10,)."""
    return torch.arange(CLASSES).repeat(samples)


@torch.no_grad()
def sample(model: Denoiser, classes: Tensor, how: Sampling) -> Tensor:
    """Return an image of each class, (images, 1, 8, 8) fp32 in [-1, 1].

    The noise is drawn by a generator of its own, so images follow from the model and the
    arguments alone, and two models draw from the same noise.

    Note [the ends]
        At the last time nothing of an image is kept, and the image that a prediction stands for
        is a difference divided by 0; the walk begins one time before, where a noise of the right
        size is all but the same. There, errors are still divided by 1.6e-3: the image is clamped
        to the range of pixels, and the noise is what then explains the noisy image. The walk
        ends at time 0, where the image is that image.

    Args:
        model: predicts noise; a ``DiT`` in eval mode.
        classes: (images,) int64, each below ``CLASSES``, or that for none.
        how: the steps, the guidance and the seed.
    """
    generator = torch.Generator().manual_seed(how.seed)
    noisy = torch.randn(len(classes), CHANNELS, SIDE, SIDE, generator=generator)
    times = torch.linspace(TIMES - 1, 0, how.steps + 1).round().long()
    kept = signal_rate(times.double())
    noise_share = (1 - kept**2).sqrt()
    for step in range(how.steps):
        time = times[step].expand(len(classes))
        noise = _guided_noise(model, noisy, time, classes, how.guidance)
        image = ((noisy - noise_share[step] * noise) / kept[step]).clamp(-1, 1)
        noise = (noisy - kept[step] * image) / noise_share[step]
        noisy = kept[step + 1] * image + noise_share[step + 1] * noise
    return noisy


def load_dit(path: Path) -> nn.Module:
    """Return the DiT of a checkpoint of any system and number of ranks, in eval mode.

    Raises:
        UsageError: it is no complete checkpoint, or one of a model that generates no images.
    """
    described = checkpoint.read_manifest(path).identity.model
    shape = shape_from(described)
    if not isinstance(shape, DiTShape):
        raise UsageError(
            f"checkpoint {path}: expected a DiT, got a {shape.family} model, which generates no"
            " images; give a checkpoint of a DiT"
        )
    diffusion = build_model_on_meta(shape).to_empty(device="cpu")
    checkpoint.load_weights(path, diffusion.state_dict())
    return diffusion.get_submodule("model").eval()


def _guided_noise(
    model: Denoiser, noisy: Tensor, time: Tensor, classes: Tensor, guidance: float
) -> Tensor:
    """Noise as it is predicted without a class, moved by ``guidance`` towards that with it."""
    both = torch.cat([torch.full_like(classes, CLASSES), classes])
    unguided, guided = model(noisy.repeat(2, 1, 1, 1), time.repeat(2), both).chunk(2)
    return unguided.lerp(guided, guidance)
