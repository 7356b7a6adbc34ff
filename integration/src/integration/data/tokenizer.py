"""Tokenizers: bytes, or a tokenizer.json of the library tokenizers, which may be trained here.

``--tokenizer`` is ``bytes``, ``bpe:N``, a byte-level BPE of N tokens that is trained on the corpus,
or a file. The library is imported on use, as bytes need none.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from integration.errors import UsageError

BYTES = "bytes"
BYTE_VOCABULARY = 256
# Separates documents; of tokenizers that are trained here it is the first.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_BPE = "bpe:"
_BYTES_AND_END = BYTE_VOCABULARY + 1


class Tokenizer(Protocol):
    """Converts text to token ids and back.

    Attributes:
        vocabulary: number of ids.
        end: id of the token that separates documents.
    """

    vocabulary: int
    end: int

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of ids; parts of characters become U+FFFD."""


class ByteTokenizer:
    """A token is a byte, so that any file is training data."""

    vocabulary = BYTE_VOCABULARY
    end = 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the UTF-8 bytes of each text."""
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of bytes."""
        return bytes(tokens).decode(errors="replace")


class FileTokenizer:
    """A tokenizer of the library tokenizers.

    Text that looks like a special token is encoded as ordinary text: only the trainer separates
    documents.

    Args:
        json: content of a tokenizer.json.
        source: where it is from, for errors.

    Attributes:
        json: that content.

    Raises:
        UsageError: it is no tokenizer.json, or none of its tokens ends a document.
    """

    def __init__(self, json: str, source: str) -> None:
        import tokenizers

        self.json = json
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(json)
        except Exception as error:  # the library has no class of its own
            raise UsageError(
                f"--tokenizer: expected {source} to be a tokenizer.json of the library tokenizers,"
                f" which it cannot read ({error}); give another file, or bpe:N"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ends = (self._tokenizer.token_to_id(token) for token in END_OF_TEXT)
        end = next((each for each in ends if each is not None), None)
        if end is None:
            raise UsageError(
                f"--tokenizer: expected {source} to have a token that separates documents, one of"
                f" {', '.join(END_OF_TEXT)}, got none; give another file, or bpe:N"
            )
        self.end: int = end
        # Ids need not be consecutive.
        self.vocabulary: int = max(self._tokenizer.get_vocab().values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file; a checkpoint resumes with the same tokenizer only."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, without special tokens."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of ids, special tokens included."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def read_tokenizer(path: Path) -> FileTokenizer:
    """Reads a tokenizer.json.

    Raises:
        UsageError: the file cannot be read, or as `FileTokenizer`.
    """
    try:
        return FileTokenizer(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UsageError(
            f"--tokenizer: expected bytes, bpe:N or a tokenizer.json, got {path}, which cannot be"
            f" read ({error.strerror}); give one of these"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--tokenizer: {path} is not UTF-8 ({error.reason}); give a tokenizer.json"
        ) from error


def bpe_size(option: str) -> int | None:
    """Returns the N of ``bpe:N``; None for other tokenizers.

    Raises:
        UsageError: N is no number, or too small for all bytes and the end of text.
    """
    if not option.startswith(_BPE):
        return None
    digits = option.removeprefix(_BPE)
    if not (digits.isascii() and digits.isdigit()) or int(digits) < _BYTES_AND_END:
        raise UsageError(
            f"--tokenizer {option}: expected bpe:N with a number of tokens of at least"
            f" {_BYTES_AND_END}, the bytes and the end of text; give bpe:4096, for example"
        )
    return int(digits)


def vocabulary_of(option: str) -> int:
    """Returns the number of tokens of ``--tokenizer``.

    Raises:
        UsageError: as `bpe_size` and `read_tokenizer`.
    """
    if option == BYTES:
        return BYTE_VOCABULARY
    return bpe_size(option) or read_tokenizer(Path(option)).vocabulary


def train_bpe(texts: Iterable[str], size: int) -> FileTokenizer:
    """Trains a byte-level BPE as GPT-2's (Radford et al. 2019, section 2.2).

    The words of the text and their counts have to fit into memory; the text itself does not. The
    same texts give the same tokenizer.

    Args:
        texts: the corpus.
        size: number of tokens: the end of text, the 256 bytes, and merges.

    Raises:
        UsageError: the text has too few repetitions for as many tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    trained = FileTokenizer(tokenizer.to_str(pretty=True), f"bpe:{size}")
    if trained.vocabulary != size:
        raise UsageError(
            f"--tokenizer bpe:{size}: expected a text with repetitions for {size} tokens, got one"
            f" for {trained.vocabulary}; give bpe:{trained.vocabulary}, or more --data"
        )
    return trained
