"""Samples of language models: windows of a corpus of bytes."""

from integration.data.corpus import Corpus
from integration.data.samples import Batch
from integration.errors import UsageError


class TextWindows:
    """A corpus as consecutive windows of ``sequence_length`` bytes; an incomplete one is dropped.

    A sample has ``input_ids`` and ``labels``, (sequence_length,) int64, which are equal:
    transformers' models shift labels themselves.
    """

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        self.source, self.fingerprint = corpus.source, corpus.fingerprint
        self.size = len(corpus.data)
        self.tokens = sequence_length
        count = self.size // sequence_length
        self._windows = corpus.data[: count * sequence_length].view(count, sequence_length)

    def __len__(self) -> int:
        """Number of windows."""
        return len(self._windows)

    def sample(self, slot: int, draw: int) -> Batch:
        """Returns the window at ``slot``."""
        del draw
        tokens = self._windows[slot].long()
        return {"input_ids": tokens, "labels": tokens}

    def require(self, samples: int) -> None:
        """Refuses a global batch of more windows than there are.

        Raises:
            UsageError: names the bytes of both.
        """
        require_bytes(self.size, samples, self.tokens)


def require_bytes(size: int, samples: int, sequence_length: int) -> None:
    """Refuses a text of ``size`` bytes that has fewer windows than a global batch has samples.

    Raises:
        UsageError: with the bytes of both.
    """
    if size < samples * sequence_length:
        raise UsageError(
            f"the data has {size} bytes, fewer than the {samples * sequence_length} of one global"
            f" batch ({samples} x {sequence_length}); give more data or a smaller batch"
        )
