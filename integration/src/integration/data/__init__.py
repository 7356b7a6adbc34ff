"""Text in, microbatches out."""

from integration.data.corpus import Corpus, corpus_files, load_corpus
from integration.data.loader import BatchLoader, BatchPlan

__all__ = ["BatchLoader", "BatchPlan", "Corpus", "corpus_files", "load_corpus"]
