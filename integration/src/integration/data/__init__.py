"""Reads training data and yields microbatches."""

from integration.data.corpus import Corpus, corpus_files, corpus_size, load_corpus
from integration.data.digits import Digits
from integration.data.loader import BatchLoader, BatchPlan
from integration.data.modality import Modality, load_samples, require_source
from integration.data.samples import Batch, Samples
from integration.data.text import TextWindows, require_bytes

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
