"""Training data by the modality of a model, and the loader of microbatches."""

from enum import StrEnum
from pathlib import Path

from integration.data.corpus import open_corpus
from integration.data.digits import Digits
from integration.data.loader import Batch, BatchLoader, BatchPlan, Samples
from integration.data.preparation import TOKENIZER_FILE, Tokenization, prepare_text
from integration.data.split import Split, split
from integration.data.text import POSITIONS, TextWindows, require_tokens
from integration.data.tokenizer import BYTES, vocabulary_of
from integration.errors import UsageError

__all__ = [
    "BYTES",
    "POSITIONS",
    "TOKENIZER_FILE",
    "Batch",
    "BatchLoader",
    "BatchPlan",
    "Digits",
    "Modality",
    "Samples",
    "Split",
    "TextWindows",
    "Tokenization",
    "load_samples",
    "open_corpus",
    "require_source",
    "require_tokens",
    "split",
    "vocabulary_of",
]


class Modality(StrEnum):
    """The kind of data that a model is trained on."""

    TEXT = "text"
    DIGITS = "digits"


def require_source(modality: Modality, path: Path | None) -> None:
    """Refuses a ``--data`` that does not fit the modality; reads names and sizes only.

    Raises:
        UsageError: the path is invalid, or the modality has no ``--data``.
    """
    if modality is Modality.TEXT:
        open_corpus(path)
    elif path is not None:
        raise UsageError(
            f"--data: expected none, as this model trains on {Digits.source}, got {path};"
            " leave it out"
        )


def load_samples(
    modality: Modality,
    path: Path | None,
    *,
    sequence_length: int,
    seed: int,
    tokenization: Tokenization | None = None,
    document_positions: bool = False,
) -> Samples:
    """Returns the samples of a run; all ranks call it.

    Args:
        modality: modality of the model.
        path: file or folder of text; None: the standard library's sources.
        sequence_length: tokens of a sample of text.
        seed: seed of random values in samples.
        tokenization: how text becomes tokens; by default a byte is one.
        document_positions: whether samples of text have the positions of tokens in their documents.

    Raises:
        UsageError: as `prepare_text`.
    """
    if modality is Modality.TEXT:
        how = tokenization or Tokenization()
        return prepare_text(path, sequence_length, how, document_positions=document_positions)
    return Digits(seed)
