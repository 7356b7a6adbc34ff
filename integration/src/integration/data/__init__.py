"""Text in, microbatches out."""

from integration.data.corpus import Corpus, load_corpus
from integration.data.loader import BatchLoader, BatchPlan

__all__ = ["BatchLoader", "BatchPlan", "Corpus", "load_corpus"]
