"""Samples images from a DiT.

DDIM's deterministic steps with classifier-free guidance: Song, Meng and Ermon, "Denoising Diffusion
Implicit Models" (arXiv 2010.02502), equation 12 with sigma 0; Ho and Salimans, "Classifier-Free
Diffusion Guidance" (arXiv 2207.12598), equation 6.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from integration.data.digits import CHANNELS, CLASSES, SIDE, TIMES
from integration.device import Device
from integration.errors import UsageError
from integration.models import DiTShape, build_model_on_meta, shape_from
from integration.models.dit import signal_rate
from integration.systems.base import LayerPolicies
from integration.train.checkpoint import checkpoint
from integration.train.model.precision import use_precision

_NO_POLICIES = LayerPolicies()
# Predicts the noise in images (batch, 1, 8, 8) from their times and classes, (batch,) int64.
Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sampling:
    """Options of images.

    Raises:
        UsageError: an option is outside its range.
    """

    steps: int = 50
    """Denoising steps, each of which evaluates the model once."""
    guidance: float = 2.0
    """Guidance scale: 0 ignores the class, 1 is the conditional prediction, larger values give
    images that are more typical of their class and less diverse."""
    seed: int = 0
    """Seed of the initial noise, or of the tokens."""

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if not 1 <= self.steps < TIMES:
            raise UsageError(
                f"sampling steps: expected 1 to {TIMES - 1}, as the model has {TIMES} times, got"
                f" {self.steps}; give another number"
            )
        if not 0 <= self.guidance < float("inf"):
            raise UsageError(
                f"guidance: expected a finite number of at least 0, got {self.guidance};"
                " give another number"
            )
        if self.seed < 0:
            raise UsageError(f"seed: expected at least 0, got {self.seed}; give 0 or more")


def digits_in_turn(samples: int) -> Tensor:
    """Returns the classes 0 to 9 ``samples`` times, the rows of a grid: (samples * 10,)."""
    return torch.arange(CLASSES).repeat(samples)


@torch.no_grad()
def sample(
    model: Denoiser,
    classes: Tensor,
    options: Sampling,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Samples one image per class, (images, 1, 8, 8) fp32 in [-1, 1].

    The noise comes from a separate generator: images depend on the model and the arguments only,
    and two models start from the same noise.

    Note [first and last time]
        At the last time the signal share is 0, so that the image cannot be recovered from a
        predicted noise; sampling therefore starts one time earlier, where noise of unit variance
        is nearly the right distribution. There errors are still divided by 1.6e-3: the predicted
        image is clamped to the range of pixels, and the noise is recomputed from the clamped image.
        Sampling ends at time 0, where the signal share is 1.

    Args:
        model: predicts noise; a ``DiT`` in eval mode.
        classes: (images,) int64, each below ``CLASSES``; ``CLASSES`` itself for no class; on the
            model's device.
        options: the steps, the guidance and the seed.
        progress: called with the number of steps done, before each step.
    """
    generator = torch.Generator().manual_seed(options.seed)  # the host's: one noise on any device
    noisy = torch.randn(len(classes), CHANNELS, SIDE, SIDE, generator=generator)
    times = torch.linspace(TIMES - 1, 0, options.steps + 1).round().long()
    signal = signal_rate(times.double()).to(classes.device)
    noise_share = (1 - signal**2).sqrt()
    noisy, times = noisy.to(classes.device), times.to(classes.device)
    for step in range(options.steps):
        if progress is not None:
            progress(step)
        time = times[step].expand(len(classes))
        noise = _guided_noise(model, noisy, time, classes, options.guidance)
        image = ((noisy - noise_share[step] * noise) / signal[step]).clamp(-1, 1)
        noise = (noisy - signal[step] * image) / noise_share[step]
        noisy = signal[step + 1] * image + noise_share[step + 1] * noise
    return noisy


def load_dit(path: Path, policies: LayerPolicies = _NO_POLICIES, device: str = "cpu") -> nn.Module:
    """Loads the DiT of a checkpoint of any system and number of ranks on the CPU, in eval mode.

    Args:
        path: the checkpoint.
        policies: with the recipe of its products.
        device: type of the device on which it will run.

    Raises:
        UsageError: the checkpoint is incomplete, or not a DiT's, or the recipe does not fit.
    """
    shape = shape_from(checkpoint.read_manifest(path).identity.model)
    if not isinstance(shape, DiTShape):
        raise UsageError(
            f"checkpoint {path}: expected a DiT, got a {shape.family} model, which generates no"
            " images; give a checkpoint of a DiT"
        )
    diffusion = build_model_on_meta(shape).to_empty(device="cpu")
    use_precision(diffusion, policies, device)
    checkpoint.load_weights(path, diffusion.state_dict())
    return diffusion.get_submodule("model").eval()


def _guided_noise(
    model: Denoiser, noisy: Tensor, time: Tensor, classes: Tensor, guidance: float
) -> Tensor:
    """Extrapolates from the unconditional to the conditional prediction by ``guidance``."""
    both = torch.cat([torch.full_like(classes, CLASSES), classes])
    unguided, guided = model(noisy.repeat(2, 1, 1, 1), time.repeat(2), both).chunk(2)
    return unguided.lerp(guided, guidance)


def write_images(
    path: Path,
    out: Path,
    options: Sampling,
    *,
    samples: int,
    device: Device,
    policies: LayerPolicies = _NO_POLICIES,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Samples images from a checkpoint and writes them as one PNG, a column per class.

    Args:
        path: the checkpoint.
        out: PNG file, whose folder is created.
        options: the steps, the guidance and the seed.
        samples: rows of images.
        device: of the model; it has been started.
        policies: with the recipe of the model's products.
        progress: called with the number of steps done, before each step.

    Returns:
        The number of images.

    Raises:
        UsageError: the checkpoint is incomplete or not a DiT's, the recipe does not fit, or the
            file cannot be written.
    """
    model = load_dit(path, policies, device.type)
    classes = digits_in_turn(samples).to(device.current)
    images = sample(model.to(device.current), classes, options, progress).cpu()
    # Imported after validation, as importing matplotlib takes seconds.
    from integration.report.diffusion_figure import save_grid

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_grid(images, out)
    except OSError as error:
        raise UsageError(f"cannot write --out {out} ({error.strerror}); give another") from error
    return len(images)
