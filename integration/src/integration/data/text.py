"""The windows of a text that language models train on."""

import torch
from torch import Tensor

from integration.data.loader import Batch
from integration.data.tokens import TokenStream
from integration.errors import UsageError

# Name of the positions of tokens in their documents, in a batch and in transformers' models.
POSITIONS = "position_ids"


def positions_in_documents(tokens: Tensor, end: int) -> Tensor:
    """Returns the position of each token in its document, or in what the window has of it.

    Args:
        tokens: ids of a window, (tokens,).
        end: id of the token that is the last one of each document.

    Returns:
        (tokens,) int64.
    """
    place = torch.arange(len(tokens))
    begins = torch.cat([torch.tensor([True]), tokens[:-1] == end])
    return place - place.where(begins, 0).cummax(0).values


class TextWindows:
    """A text as consecutive windows of ``sequence_length`` tokens; an incomplete one is dropped.

    A sample has ``input_ids`` and ``labels``, (sequence_length,) int64, which are equal:
    transformers' models shift labels themselves; and, if it is asked for, ``position_ids``, which
    restart with each document. See Note [packed documents] in tokens.py.

    Args:
        stream: the tokens.
        sequence_length: tokens of a window.
        source: description of the text for reports.
        size: its bytes.
        fingerprint: SHA-256 of its bytes.
        tokenizer: SHA-256 of the tokenizer; None: tokens are bytes.
        document_positions: whether samples have ``position_ids``.
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
        document_positions: bool = False,
    ) -> None:
        self.source, self.size = source, size
        self.fingerprint, self.tokenizer = fingerprint, tokenizer
        self.tokens = sequence_length
        self._stream, self._has_positions = stream, document_positions

    def __len__(self) -> int:
        """Number of windows."""
        return len(self._stream) // self.tokens

    def sample(self, slot: int, draw: int) -> Batch:
        """Returns the window at ``slot``."""
        del draw
        start = slot * self.tokens
        tokens = torch.from_numpy(self._stream.read(start, start + self.tokens).astype("int64"))
        sample = {"input_ids": tokens, "labels": tokens}
        if self._has_positions:
            sample[POSITIONS] = positions_in_documents(tokens, self._stream.end)
        return sample

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
