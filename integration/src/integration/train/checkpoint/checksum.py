"""Computes checksums of files while they are written, so that nothing is read back.

64-bit XXH3 (package xxhash, which wraps the algorithm author's C library) hashes more than 10 GB/s
on one core, several times the speed of a save.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

_CHUNK = 2**24
# Methods of files that do not change the content.
_DELEGATED = frozenset({"tell", "flush", "fileno", "close"})


def checksum(data: bytes) -> str:
    """Returns the checksum of bytes, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def file_checksum(path: Path) -> str:
    """Returns the checksum of a file; at most 16 MiB of it are in memory at once."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class ChecksumFileSystem(FileSystem):
    """A file system for DCP that records the checksum of every file that it writes.

    Attributes:
        checksums: checksum by file name.
    """

    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Opens a file and hashes what is written to it."""
        with super().create_stream(path, mode) as file:
            if "w" not in mode:
                yield file
                return
            stream = _HashedStream(file)
            yield cast(io.IOBase, stream)
            self.checksums[Path(path).name] = stream.hexdigest()


class _HashedStream:
    """An append-only file; without seek, as the checksum would then be wrong."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._digest = xxhash.xxh3_64()

    def __getattr__(self, name: str) -> Any:
        if name not in _DELEGATED:
            raise AttributeError(name)
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        self._digest.update(data)
        written: int = self._file.write(data)
        return written

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
