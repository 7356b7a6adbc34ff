"""Files that could not be written: which error it was, however torch wraps it."""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class Writer(dcp.FileSystemWriter):
    """DCP's writer of files, whose errors are those of the file system.

    torch's zip writer covers an ``OSError`` of the file below it with a RuntimeError of its own
    ("unexpected pos 704 vs 598", caffe2/serialize/inline_container.cc), and what an exception was
    raised from is lost on the way to other ranks.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files.

        Raises:
            OSError: it could not.
        """
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            if (cause := os_error(error)) is None:
                raise
            raise cause from None


def os_error(error: BaseException) -> OSError | None:
    """Return the newest ``OSError`` among an exception and those that it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
