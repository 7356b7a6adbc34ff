"""What every kind of training data says of itself."""

from typing import Protocol

from torch import Tensor

# Named tensors of one sample, or of a microbatch, whose first dim counts samples then.
Batch = dict[str, Tensor]


class Samples(Protocol):
    """A finite, ordered collection of samples.

    Attributes:
        source: where it came from, for reports.
        size: bytes of it, for reports.
        fingerprint: SHA-256 of its content; a checkpoint resumes on the same content only.
        tokens: that a model sees per sample.
    """

    source: str
    size: int
    fingerprint: str
    tokens: int

    def __len__(self) -> int:
        """How many samples an epoch has."""

    def sample(self, slot: int, draw: int) -> Batch:
        """Return the sample at ``slot``, the ``draw``-th that the run sees.

        What is random in a sample follows from ``draw`` alone, so that it is the same however
        ranks share a batch and wherever a run resumes.
        """

    def require(self, samples: int) -> None:
        """Refuse a global batch of more samples than there are.

        Raises:
            UsageError: says what there is and what is needed.
        """
