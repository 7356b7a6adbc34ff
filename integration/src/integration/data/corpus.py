"""Reads text as a sequence of bytes: a file, a folder, or Python's standard library."""

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
        UsageError: ``path`` does not exist, cannot be read, or holds no bytes.
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


def _standard_library() -> list[Path]:
    # The stdlib folder also contains site-packages, which differ between environments, and the
    # interpreter's test suite.
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    found: list[Path] = []
    for folder, below, names in os.walk(sysconfig.get_path("stdlib")):
        below[:] = set(below) - skipped  # not walked, as they may be large
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found)
