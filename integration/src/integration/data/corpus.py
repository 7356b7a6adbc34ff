"""The text that language models train on: a file, a folder, or Python's standard library.

A file is a document. Text is read block by block, so that a corpus need not fit into memory.
"""

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from integration.errors import UsageError

# Separates documents where they are bytes: text contains no NUL bytes.
DOCUMENT_END = b"\0"
# Bytes of a block, which ends with the next line.
_BLOCK = 2**18


@dataclass(frozen=True)
class TextBlock:
    """Some consecutive text of a document.

    Attributes:
        text: may be empty.
        ends_document: whether it is the document's last block.
    """

    text: str
    ends_document: bool


@dataclass(frozen=True)
class Corpus:
    """The documents of a training text.

    Attributes:
        files: the documents, in order; none is empty.
        sizes: bytes of each.
        source: description for reports.
    """

    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    source: str

    @property
    def size(self) -> int:
        """Bytes of all documents and of the separators between them."""
        return sum(self.sizes) + len(DOCUMENT_END) * (len(self.files) - 1)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the documents, separated by NUL bytes; all files are read once.

        Raises:
            UsageError: a file cannot be read.
        """
        digest = hashlib.sha256()
        for index, path in enumerate(self.files):
            digest.update(DOCUMENT_END if index else b"")
            with readable(), path.open("rb") as file:
                while data := file.read(_BLOCK):
                    digest.update(data)
        return digest.hexdigest()

    def blocks(self) -> Iterator[TextBlock]:
        """Yields the documents' text, decoded as UTF-8; bytes that are not become U+FFFD.

        Raises:
            UsageError: a file cannot be read.
        """
        for path in self.files:
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            with readable(), path.open("rb") as file:
                # Blocks end where lines do, so that few words are divided.
                while data := file.read(_BLOCK) + file.readline(_BLOCK):
                    yield TextBlock(decoder.decode(data), ends_document=False)
            yield TextBlock(decoder.decode(b"", final=True), ends_document=True)


def open_corpus(path: Path | None) -> Corpus:
    """Returns the corpus at ``path``, or the standard library's sources; reads names and sizes.

    Every file below a folder is a document, in the order of their paths, so that every rank and
    every run on one machine sees the same text.

    Raises:
        UsageError: ``path`` does not exist, cannot be read, or contains no bytes.
    """
    if path is None:
        return _standard_corpus()
    with readable():
        return _corpus(_files_of(path), str(path))


@cache
def _standard_corpus() -> Corpus:
    """Returns one object for all runs of a process, which compute its fingerprint once."""
    with readable():
        return _corpus(_standard_library(), "the Python standard library's sources")


def _corpus(found: Sequence[Path], source: str) -> Corpus:
    sizes = {file: file.stat().st_size for file in found}
    files = tuple(file for file in found if sizes[file])
    if not files:
        raise UsageError(f"{source} contains no bytes to train on; give a --data with text")
    return Corpus(files, tuple(sizes[file] for file in files), source)


@contextmanager
def readable() -> Iterator[None]:
    """Makes an error on reading the data one sentence.

    Raises:
        UsageError: a file within the context cannot be read.
    """
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
