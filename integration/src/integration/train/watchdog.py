"""What each rank was doing when a run stood still: `fused_comm.diagnosis`, in the run folder.

gloo notes its collectives in the flight recorder as NCCL does (c10d/FlightRecorder.hpp; torch 2.11
to 2.15), but only NCCL writes them by itself. Here every rank does, when a step has taken nearly as
long as the time-out of collectives, also where it never came to a collective, and when it fails.
"""

import os
from pathlib import Path

import torch.distributed as dist

from fused_comm.diagnosis import Watch
from integration.errors import UsageError

FOLDER = "flight-recorder"
_DUMP = "rank"  # the analyser takes what stands before the number as the files' prefix
_COLLECTIVES = "2000"
# A collective that a step begins with fails at the time-out, and that ends the watch.
_SHARE_OF_TIMEOUT = 0.9


def record_collectives(run: Path) -> None:
    """Have torch keep the newest collectives, and NCCL dump them below ``run`` at a time-out.

    To be called before a process group is made; what the environment says already stays.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _COLLECTIVES)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(run / FOLDER / _DUMP))


class Watchdog(Watch):
    """A `Watch` that writes into the run folder; nothing is written if all goes well.

    Args:
        run: the run folder.
        timeout: of collectives, in seconds; each step that takes 0.9 of it is reported.
    """

    def __init__(self, run: Path, *, timeout: float) -> None:
        super().__init__(_SHARE_OF_TIMEOUT * timeout, folder=run / FOLDER)
        if dist.get_backend() == "nccl":
            (run / FOLDER).mkdir(parents=True, exist_ok=True)  # it makes none

    def reports(self, error: BaseException) -> bool:
        """Returns whether an error that ends the run is reported: those that are not the user's."""
        return not isinstance(error, UsageError)
