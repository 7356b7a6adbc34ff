"""Real text as one run of bytes: a file, a folder, or this Python's own standard library."""

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

# No text holds a NUL byte, so it marks where one document ends and the next begins.
DOCUMENT_END = b"\0"


@dataclass(frozen=True)
class Corpus:
    """The training text.

    Attributes:
        data: (bytes,) uint8 on the CPU, documents joined by NUL bytes.
        source: where it came from, for reports.
        fingerprint: SHA-256 of ``data``; a checkpoint resumes on the same bytes only.
    """

    data: Tensor  # (bytes,) uint8, owned by the corpus, never written
    source: str
    fingerprint: str


def load_corpus(path: Path | None) -> Corpus:
    """Read ``path`` (a file, or every file below a folder), or the standard library's sources.

    Files are read in the order of their paths, so that every rank and every run on one
    machine sees the same bytes.

    Raises:
        UsageError: ``path`` does not exist, cannot be read, or holds no bytes.
    """
    return _standard_corpus() if path is None else _read(corpus_files(path), str(path))


@cache
def _standard_corpus() -> Corpus:
    """Read once: runs that share a process share it, and it stays as it is."""
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
    """Return the files that ``load_corpus`` reads, empty ones left out, in its order.

    Raises:
        UsageError: as ``load_corpus``, but for files that turn out to be unreadable.
    """
    with _readable():
        found = _standard_library() if path is None else _files_of(path)
        files = [file for file in found if file.stat().st_size]
    if not files:
        raise UsageError(f"{path} holds no bytes to train on; give a --data that has text in it")
    return files


def corpus_size(path: Path | None) -> int:
    """Return the bytes of the text that ``load_corpus`` returns, without reading it.

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
    # The stdlib folder also holds site-packages and the interpreter's test suite: neither
    # is the library's own source, and the first differs from one environment to the next.
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    found: list[Path] = []
    for folder, below, names in os.walk(sysconfig.get_path("stdlib")):
        below[:] = set(below) - skipped  # not walked: there may be more in them than in all else
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found)
