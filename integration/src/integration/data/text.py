"""Text as training data: a corpus of bytes, and the windows of it that language models train on.

The corpus is a file, a folder, or the sources of Python's standard library.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from integration.data.loader import Batch
from integration.errors import UsageError

# Text contains no NUL bytes, so that one can separate documents.
DOCUMENT_END = b"\0"


@dataclass(frozen=True)
class Corpus:
    """The training text.

    Attributes:
        data: (bytes,) uint8 on the CPU, documents joined by NUL bytes; never written.
        source: description for reports.
        fingerprint: SHA-256 of ``data``; a checkpoint resumes on the same bytes only.
    """

    data: Tensor
    source: str
    fingerprint: str


def load_corpus(path: Path | None) -> Corpus:
    """Reads ``path`` (a file, or every file below a folder), or the standard library's sources.

    Files are read in the order of their paths, so that every rank and every run on one
    machine sees the same bytes.

    Raises:
        UsageError: ``path`` does not exist, cannot be read, or contains no bytes.
    """
    return _standard_corpus() if path is None else _read(corpus_files(path), str(path))


@cache
def _standard_corpus() -> Corpus:
    """Reads the sources once for all runs that share a process."""
    return _read(corpus_files(None), "the Python standard library's sources")


def _read(files: Sequence[Path], source: str) -> Corpus:
    with _readable():
        text = DOCUMENT_END.join(file.read_bytes() for file in files)
    return Corpus(
        data=torch.frombuffer(bytearray(text), dtype=torch.uint8),
        source=source,
        fingerprint=hashlib.sha256(text).hexdigest(),
    )


def corpus_files(path: Path | None) -> list[Path]:
    """Returns the files that ``load_corpus`` reads, empty ones left out, in its order.

    Raises:
        UsageError: as ``load_corpus``, except for unreadable files.
    """
    with _readable():
        found = _standard_library() if path is None else _files_of(path)
        files = [file for file in found if file.stat().st_size]
    if not files:
        raise UsageError(f"{path} contains no bytes to train on; give a --data with text")
    return files


def corpus_size(path: Path | None) -> int:
    """Returns the bytes of the text that ``load_corpus`` returns, without reading it.

    Raises:
        UsageError: as ``corpus_files``.
    """
    files = corpus_files(path)
    with _readable():
        return sum(file.stat().st_size for file in files) + len(DOCUMENT_END) * (len(files) - 1)


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot read {error.filename}: {error.strerror}; give another --data"
        ) from error


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    problem = "is neither a file nor a folder" if path.exists() else "does not exist"
    raise UsageError(f"data path {path} {problem}; give --data an existing file or folder")


@cache
def _standard_library() -> tuple[Path, ...]:
    # The stdlib folder also contains site-packages, which differ between environments, and the
    # interpreter's test suite.
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    found: list[Path] = []
    for folder, below, names in os.walk(sysconfig.get_path("stdlib")):
        below[:] = set(below) - skipped  # not walked, as they may be large
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return tuple(sorted(found))


class TextWindows:
    """A corpus as consecutive windows of ``sequence_length`` bytes; an incomplete one is dropped.

    A sample has ``input_ids`` and ``labels``, (sequence_length,) int64, which are equal:
    transformers' models shift labels themselves.
    """

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        self.source, self.fingerprint = corpus.source, corpus.fingerprint
        self.size = len(corpus.data)
        self.tokens = sequence_length
        count = self.size // sequence_length
        self._windows = corpus.data[: count * sequence_length].view(count, sequence_length)

    def __len__(self) -> int:
        """Number of windows."""
        return len(self._windows)

    def sample(self, slot: int, draw: int) -> Batch:
        """Returns the window at ``slot``."""
        del draw
        tokens = self._windows[slot].long()
        return {"input_ids": tokens, "labels": tokens}

    def require(self, samples: int) -> None:
        """Refuses a global batch of more windows than there are.

        Raises:
            UsageError: names the bytes of both.
        """
        require_bytes(self.size, samples, self.tokens)


def require_bytes(size: int, samples: int, sequence_length: int) -> None:
    """Refuses a text of ``size`` bytes that has fewer windows than a global batch has samples.

    Raises:
        UsageError: with the bytes of both.
    """
    if size < samples * sequence_length:
        raise UsageError(
            f"the data has {size} bytes, fewer than the {samples * sequence_length} of one global"
            f" batch ({samples} x {sequence_length}); give more data or a smaller batch"
        )
