"""Handwritten digits, for diffusion models: scikit-learn's, which come with the package.

1,797 images of 8 x 8 pixels in 10 classes, of E. Alpaydin and C. Kaynak (UCI machine learning
repository, "Optical Recognition of Handwritten Digits", 1998).
"""

import hashlib

import numpy as np
import torch

from integration.data.samples import Batch
from integration.errors import UsageError

SIDE = 8
CHANNELS = 1
CLASSES = 10
TIMES = 1000
# How many images lose their class in training, so that a model also learns the noise of any digit.
_WITHOUT_CLASS = 0.1
_PIXEL_RANGE = 16.0
_PATCHES = 16


class Digits:
    """Images with a class, a time and a noise each, as diffusion models are trained.

    A sample has ``x``, (1, 8, 8) fp32 in [-1, 1]; ``t``, its time in [0, 1000), and ``y``, its
    class or 10 for none, both int64 scalars; and ``noise``, of ``x``'s shape.

    Attributes:
        images: (images, 1, 8, 8) fp32 in [-1, 1], never written.
        classes: (images,) int64, of each.

    Args:
        seed: of times, noises, and which images lose their class.
    """

    source = "scikit-learn's handwritten digits"
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
        """How many images there are."""
        return len(self.images)

    def sample(self, slot: int, draw: int) -> Batch:
        """Return the image at ``slot`` with what ``draw`` decides."""
        # Not torch's generator: of a seed the CPU's takes 32 bits, too few for two numbers.
        random = np.random.default_rng((self._seed, draw))
        image = self.images[slot]
        time = torch.tensor(random.integers(TIMES))
        noise = torch.from_numpy(random.standard_normal(image.shape, dtype=np.float32))
        dropped = random.random() < _WITHOUT_CLASS
        label = torch.tensor(CLASSES) if dropped else self.classes[slot]
        return {"x": image, "t": time, "y": label, "noise": noise}

    def require(self, samples: int) -> None:
        """Refuse a global batch of more images than there are.

        Raises:
            UsageError: with both numbers.
        """
        if len(self) < samples:
            raise UsageError(
                f"{self.source} are {len(self)} images, fewer than the {samples} of one global"
                " batch; give a smaller --global-batch"
            )
