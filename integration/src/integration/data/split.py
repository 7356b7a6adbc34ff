"""Divides samples into those of training and those that are held out for evaluation.

Held-out samples are spread evenly over the data: of ``n`` samples every ``n // held_out``-th one.
Which these are depends on neither the seed nor the degrees.
"""

from dataclasses import dataclass

from integration.data.loader import Batch, Samples
from integration.errors import UsageError

# The random values of held-out samples are the same in each evaluation, and of none in training.
_FIRST_DRAW = 2**62


@dataclass(frozen=True)
class Split:
    """Disjoint samples of one source, which together are all of them.

    Attributes:
        training: samples to train on.
        held_out: samples to evaluate; None: there are none.
    """

    training: Samples
    held_out: Samples | None


def split(data: Samples, held_out: int) -> Split:
    """Holds out some samples.

    Args:
        data: all samples.
        held_out: number of samples to hold out; 0: all are for training.

    Raises:
        UsageError: more than half of the samples would be held out.
    """
    if not held_out:
        return Split(data, None)
    every = len(data) // held_out
    if every < 2:
        raise UsageError(
            f"--eval-samples {held_out}: expected at most half of the {len(data)} samples of"
            f" {data.source}; give a smaller number, or more data"
        )
    training = _Training(data, len(data) - held_out, every, held_out)
    return Split(training, _HeldOut(data, held_out, every, held_out))


class _Part:
    """Some samples of a source.

    Args:
        data: all samples.
        count: number of samples of this part.
        every: distance of held-out samples.
        held_out: their number.
    """

    def __init__(self, data: Samples, count: int, every: int, held_out: int) -> None:
        self.source, self.size, self.fingerprint = data.source, data.size, data.fingerprint
        self.tokenizer, self.tokens = data.tokenizer, data.tokens
        self._data, self._count, self._every, self._held_out = data, count, every, held_out

    def __len__(self) -> int:
        return self._count

    def require(self, samples: int) -> None:
        """Refuses a global batch of more samples than there are.

        Raises:
            UsageError: names both numbers.
        """
        if len(self) < samples:
            raise UsageError(
                f"--eval-samples {self._held_out}: expected at least one global batch of {samples}"
                f" samples on either side, got {len(self)} of {len(self._data)}; give more data,"
                " or smaller numbers"
            )


class _Training(_Part):
    """The samples that are not held out, in order."""

    def sample(self, slot: int, draw: int) -> Batch:
        row, rest = divmod(slot, self._every - 1)
        if row < self._held_out:
            return self._data.sample(row * self._every + rest, draw)
        return self._data.sample(slot + self._held_out, draw)  # behind the last held-out one


class _HeldOut(_Part):
    """The last of each ``every`` samples."""

    def sample(self, slot: int, draw: int) -> Batch:
        return self._data.sample((slot + 1) * self._every - 1, _FIRST_DRAW + draw)
