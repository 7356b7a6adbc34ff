"""Which samples a model's modality means."""

from enum import StrEnum
from pathlib import Path

from integration.data.corpus import corpus_files, load_corpus
from integration.data.digits import Digits
from integration.data.samples import Samples
from integration.data.text import TextWindows
from integration.errors import UsageError


class Modality(StrEnum):
    """What a model is trained on."""

    TEXT = "text"
    DIGITS = "digits"


def require_source(modality: Modality, path: Path | None) -> None:
    """Refuse a ``--data`` that cannot be what a modality needs; looks at names and sizes only.

    Raises:
        UsageError: the path does not do, or there is nothing to choose.
    """
    if modality is Modality.TEXT:
        corpus_files(path)
    elif path is not None:
        raise UsageError(
            f"--data {path} was given, and this model trains on {Digits.source}; leave it out"
        )


def load_samples(
    modality: Modality, path: Path | None, *, sequence_length: int, seed: int
) -> Samples:
    """Read the training data.

    Args:
        modality: of the model.
        path: of text; None: the standard library's sources.
        sequence_length: tokens of a sample of text.
        seed: of what is random in samples.

    Raises:
        UsageError: as ``load_corpus``.
    """
    if modality is Modality.TEXT:
        return TextWindows(load_corpus(path), sequence_length)
    return Digits(seed)
