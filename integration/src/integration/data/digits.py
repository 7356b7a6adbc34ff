"""scikit-learn's handwritten digits, for diffusion models; the package contains them.

1,797 images of 8 x 8 pixels in 10 classes, by E. Alpaydin and C. Kaynak (UCI machine learning
repository, "Optical Recognition of Handwritten Digits", 1998).
"""

import hashlib

import numpy as np
import torch

from integration.data.loader import Batch
from integration.errors import UsageError

SIDE = 8
CHANNELS = 1
CLASSES = 10
TIMES = 1000
# Probability of dropping the class in training, for classifier-free guidance.
_CLASS_DROPOUT = 0.1
_PIXEL_RANGE = 16.0
_PATCHES = 16


class Digits:
    """Training samples of a diffusion model: an image, its class, a time and a noise.

    A sample has ``x``, (1, 8, 8) fp32 in [-1, 1]; ``t``, its time in [0, 1000), and ``y``, its
    class or 10 for none, both int64 scalars; and ``noise``, with the shape of ``x``.

    Attributes:
        images: (images, 1, 8, 8) fp32 in [-1, 1], never written.
        classes: (images,) int64.

    Args:
        seed: seed of times, noises and dropped classes.
    """

    source = "scikit-learn's handwritten digits"
    tokenizer: str | None = None
    tokens = _PATCHES

    def __init__(self, seed: int) -> None:
        # Imported here: it takes a second.
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        digits = load_digits()
        images = torch.from_numpy(digits.images).float()
        self.images = (images / (_PIXEL_RANGE / 2) - 1).unsqueeze(1)  # (images, 1, 8, 8)
        self.classes = torch.from_numpy(digits.target).long()  # (images,)
        content = digits.images.tobytes() + self.classes.numpy().tobytes()
        self.size = len(content)
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self._seed = seed

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def sample(self, slot: int, draw: int) -> Batch:
        """Returns the image at ``slot``, with the time, noise and class of ``draw``."""
        # torch's CPU generator uses 32 bits of a seed, too few for both numbers.
        random = np.random.default_rng((self._seed, draw))
        image = self.images[slot]
        time = torch.tensor(random.integers(TIMES))
        noise = torch.from_numpy(random.standard_normal(image.shape, dtype=np.float32))
        dropped = random.random() < _CLASS_DROPOUT
        label = torch.tensor(CLASSES) if dropped else self.classes[slot]
        return {"x": image, "t": time, "y": label, "noise": noise}

    def require(self, samples: int) -> None:
        """Refuses a global batch of more images than there are.

        Raises:
            UsageError: with both numbers.
        """
        if len(self) < samples:
            raise UsageError(
                f"--global-batch: expected at most {len(self)}, the number of images of"
                f" {self.source}, got {samples}; give a smaller one"
            )
