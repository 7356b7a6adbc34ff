"""Training data by the modality of a model, and the loader of microbatches."""

from enum import StrEnum
from pathlib import Path

from integration.data.digits import Digits
from integration.data.loader import Batch, BatchLoader, BatchPlan, Samples
from integration.data.text import (
    Corpus,
    TextWindows,
    corpus_files,
    corpus_size,
    load_corpus,
    require_bytes,
)
from integration.errors import UsageError

__all__ = [
    "Batch",
    "BatchLoader",
    "BatchPlan",
    "Corpus",
    "Digits",
    "Modality",
    "Samples",
    "TextWindows",
    "corpus_files",
    "corpus_size",
    "load_corpus",
    "load_samples",
    "require_bytes",
    "require_source",
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
        corpus_files(path)
    elif path is not None:
        raise UsageError(
            f"--data: expected none, as this model trains on {Digits.source}, got {path};"
            " leave it out"
        )


def load_samples(
    modality: Modality, path: Path | None, *, sequence_length: int, seed: int
) -> Samples:
    """Reads the training data.

    Args:
        modality: modality of the model.
        path: file or folder of text; None: the standard library's sources.
        sequence_length: tokens of a sample of text.
        seed: seed of random values in samples.

    Raises:
        UsageError: as ``load_corpus``.
    """
    if modality is Modality.TEXT:
        return TextWindows(load_corpus(path), sequence_length)
    return Digits(seed)
