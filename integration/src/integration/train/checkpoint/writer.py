"""DCP's file writer with checksums, which raises the file system's errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from integration.train.checkpoint.checksum import ChecksumFileSystem


@dataclass(frozen=True)
class _CheckedResult(WriteResult):
    """The result of a write that DCP sends to the coordinator, with the file's checksum."""

    checksum: str


class CheckpointWriter(dcp.FileSystemWriter):
    """DCP's file writer, which computes checksums and raises the file system's errors.

    torch's zip writer replaces an ``OSError`` of the file by a RuntimeError ("unexpected pos 704 vs
    598", caffe2/serialize/inline_container.cc), and an exception's cause is not sent to other
    ranks.

    Attributes:
        checksums: checksums of the files of all ranks, by name; on the coordinator, after
            ``finish``.
    """

    checksums: dict[str, str]

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = ChecksumFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, without torch's CRC32, which the checksums replace.

        Raises:
            OSError: a file could not be written.
        """
        try:
            with _without_crc32():
                written = super().write_data(plan, planner).wait()
        except Exception as error:
            if (cause := os_error(error)) is None:
                raise
            raise cause from None
        assert isinstance(self.fs, ChecksumFileSystem)
        sums = self.fs.checksums
        results: Future[list[WriteResult]] = Future()
        results.set_result(
            [
                _CheckedResult(
                    each.index,
                    each.size_in_bytes,
                    each.storage_data,
                    sums[each.storage_data.relative_path],
                )
                for each in written
            ]
        )
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the metadata and collects the checksums; the coordinator calls it."""
        self.checksums = {
            each.storage_data.relative_path: each.checksum
            for rank in results
            for each in rank
            if isinstance(each, _CheckedResult)
        }
        super().finish(metadata, results)
        assert isinstance(self.fs, ChecksumFileSystem)
        # DCP writes it under another name and renames it.
        self.checksums[".metadata"] = self.fs.checksums[".metadata.tmp"]


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Disables the CRC32 of ``torch.save``, which is slower than XXH3."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def os_error(error: BaseException) -> OSError | None:
    """Returns the latest ``OSError`` among an exception and its causes."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
