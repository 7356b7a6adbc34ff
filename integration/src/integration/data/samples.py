"""The interface of training data."""

from typing import Protocol

from torch import Tensor

# Tensors by name, of one sample, or of a microbatch with a first dim of samples.
Batch = dict[str, Tensor]


class Samples(Protocol):
    """A finite, ordered collection of samples.

    Attributes:
        source: description for reports.
        size: size in bytes, for reports.
        fingerprint: SHA-256 of the content; a checkpoint resumes on the same content only.
        tokens: tokens of a sample.
    """

    source: str
    size: int
    fingerprint: str
    tokens: int

    def __len__(self) -> int:
        """Number of samples of an epoch."""

    def sample(self, slot: int, draw: int) -> Batch:
        """Returns the sample at ``slot``, the run's sample number ``draw``.

        Random values of a sample depend on ``draw`` only, so that they are the same at every
        data-parallel degree and after a resume.
        """

    def require(self, samples: int) -> None:
        """Refuses a global batch of more samples than there are.

        Raises:
            UsageError: names both numbers.
        """
