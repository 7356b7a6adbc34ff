"""Files that could not be written: which error it was, however torch wraps it."""

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

from integration.train.checksum import ChecksumFileSystem


@dataclass(frozen=True)
class _CheckedResult(WriteResult):
    """What DCP sends to the coordinator of an item, with the checksum of the file it is in."""

    checksum: str


class CheckpointWriter(dcp.FileSystemWriter):
    """DCP's writer of files, with their checksums, and whose errors are the file system's.

    torch's zip writer covers an ``OSError`` of the file below it with a RuntimeError of its own
    ("unexpected pos 704 vs 598", caffe2/serialize/inline_container.cc), and what an exception was
    raised from is lost on the way to other ranks.

    Attributes:
        checksums: of the files of all ranks, by name; on the coordinator, after ``finish``.
    """

    checksums: dict[str, str]

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = ChecksumFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, without torch's CRC32, which their checksums replace.

        Raises:
            OSError: it could not.
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
        """Writes the metadata and collect the checksums; the coordinator calls it."""
        self.checksums = {
            each.storage_data.relative_path: each.checksum
            for rank in results
            for each in rank
            if isinstance(each, _CheckedResult)
        }
        super().finish(metadata, results)
        assert isinstance(self.fs, ChecksumFileSystem)
        # It is written under another name and renamed.
        self.checksums[".metadata"] = self.fs.checksums[".metadata.tmp"]


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Have ``torch.save`` compute no CRC32 of its records: that takes longer than XXH3 of them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def os_error(error: BaseException) -> OSError | None:
    """Returns the newest ``OSError`` among an exception and those that it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
