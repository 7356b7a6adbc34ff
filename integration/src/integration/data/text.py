"""The windows of a text that language models train on."""

import torch

from integration.data.loader import Batch
from integration.data.tokens import TokenStream
from integration.errors import UsageError


class TextWindows:
    """A text as consecutive windows of ``sequence_length`` tokens; an incomplete one is dropped.

    A sample has ``input_ids`` and ``labels``, (sequence_length,) int64, which are equal:
    transformers' models shift labels themselves. See Note [packed documents] in tokens.py.

    Args:
        stream: the tokens.
        sequence_length: tokens of a window.
        source: description of the text for reports.
        size: its bytes.
        fingerprint: SHA-256 of its bytes.
        tokenizer: SHA-256 of the tokenizer; None: tokens are bytes.
    """

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        *,
        source: str,
        size: int,
        fingerprint: str,
        tokenizer: str | None = None,
    ) -> None:
        self.source, self.size = source, size
        self.fingerprint, self.tokenizer = fingerprint, tokenizer
        self.tokens = sequence_length
        self._stream = stream

    def __len__(self) -> int:
        """Number of windows."""
        return len(self._stream) // self.tokens

    def sample(self, slot: int, draw: int) -> Batch:
        """Returns the window at ``slot``."""
        del draw
        start = slot * self.tokens
        tokens = torch.from_numpy(self._stream.read(start, start + self.tokens).astype("int64"))
        return {"input_ids": tokens, "labels": tokens}

    def require(self, samples: int) -> None:
        """Refuses a global batch of more windows than there are.

        Raises:
            UsageError: names the tokens of both.
        """
        require_tokens(len(self._stream), samples, self.tokens, unit=self._stream.unit)


def require_tokens(count: int, samples: int, sequence_length: int, *, unit: str = "bytes") -> None:
    """Refuses a text of ``count`` tokens that has fewer windows than a global batch has samples.

    Raises:
        UsageError: with the tokens of both.
    """
    if count < samples * sequence_length:
        raise UsageError(
            f"the data has {count} {unit}, fewer than the {samples * sequence_length} of one global"
            f" batch ({samples} x {sequence_length}); give more data or a smaller batch"
        )
