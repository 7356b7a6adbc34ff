"""The tokens of a corpus as one stream, of which any part can be read from files.

Note [packed documents]
    Documents follow one another, separated by the tokenizer's end-of-text token, and the stream is
    divided into windows of the sequence length wherever they end: GPT-style packing. A document may
    continue in the next window, and a window may have parts of several documents. Labels are not
    masked at the end of a document: every window has as many predictions, so that the mean of the
    microbatches' losses is the loss of the batch at every degree. Attention is not either, by
    default: the model attends to earlier documents of its window and learns when to ignore them.
    With ``document_positions`` a sample also has the positions of its tokens in their documents,
    of which an end-of-text token is the last one; attention is within a document then.
"""

import os
import socket
from bisect import bisect_right
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from integration.data.corpus import DOCUMENT_END, Corpus, readable
from integration.data.tokenizer import FileTokenizer
from integration.errors import UsageError

TokenIds = npt.NDArray[Any]
# Blocks that are encoded at a time, by several threads.
_BLOCKS = 16


class TokenStream(Protocol):
    """The tokens of a corpus in order.

    Attributes:
        unit: what a token is, in the plural.
        end: id of the token behind a document.
    """

    unit: str
    end: int

    def __len__(self) -> int:
        """Number of tokens."""

    def read(self, start: int, stop: int) -> TokenIds:
        """Returns the ids of tokens, (stop - start,), a copy."""


class ByteStream:
    """The bytes of a corpus, with a NUL byte between documents, read from its files on demand."""

    unit = "bytes"
    end = DOCUMENT_END[0]

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        # Of each document, and of one behind the last.
        self._starts = list(accumulate((size + 1 for size in corpus.sizes), initial=0))

    def __len__(self) -> int:
        """Number of bytes."""
        return self._starts[-1] - 1

    def read(self, start: int, stop: int) -> TokenIds:
        """Returns bytes, (stop - start,) uint8.

        Raises:
            UsageError: a file cannot be read, or is shorter than before.
        """
        found = np.zeros(stop - start, np.uint8)
        for index in range(bisect_right(self._starts, start) - 1, len(self._corpus.files)):
            document = self._starts[index]
            if document >= stop:
                break
            low = max(start, document)
            high = max(low, min(stop, document + self._corpus.sizes[index]))
            found[low - start : high - start] = self._document(index, low - document, high - low)
        return found

    def _document(self, index: int, offset: int, count: int) -> TokenIds:
        path = self._corpus.files[index]
        with readable(), path.open("rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(count)
        if len(data) != count:
            raise UsageError(
                f"{path} has become shorter while the run reads it; start the run again, with"
                " another --out"
            )
        return np.frombuffer(data, np.uint8)


class TokenFile:
    """Token ids in a file, which is mapped into memory.

    Args:
        path: file from `write_tokens`.
        vocabulary: number of ids of the tokenizer.
        end: id of the token behind a document.
    """

    unit = "tokens"

    def __init__(self, path: Path, vocabulary: int, end: int) -> None:
        self.end = end
        self._ids = np.memmap(path, _dtype(vocabulary), mode="r")

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._ids)

    def read(self, start: int, stop: int) -> TokenIds:
        """Returns ids, (stop - start,) uint16 or uint32."""
        return np.array(self._ids[start:stop])


def write_tokens(corpus: Corpus, tokenizer: FileTokenizer, path: Path) -> None:
    """Encodes a corpus into a file: uint16 or uint32, an end of text behind each document.

    The file appears when it is complete, and other processes may write it at the same time.

    Raises:
        UsageError: a file of the corpus cannot be read.
    """
    dtype, blocks = _dtype(tokenizer.vocabulary), corpus.blocks()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            while batch := list(islice(blocks, _BLOCKS)):
                encoded = tokenizer.encode([block.text for block in batch])
                for block, ids in zip(batch, encoded, strict=True):
                    end = [tokenizer.end] if block.ends_document else []
                    np.array([*ids, *end], dtype).tofile(file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _dtype(vocabulary: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocabulary <= 2**16 else np.uint32
