"""Writes a hang report of each rank into the run folder, by `fused_comm.diagnosis`.

gloo records its collectives in the flight recorder as NCCL does (c10d/FlightRecorder.hpp; torch
2.11 to 2.15), but only NCCL writes them by itself. This watchdog writes them when a step has taken
nearly as long as the timeout of collectives, even without a collective, and when a step fails.
"""

import os
from pathlib import Path

import torch.distributed as dist

from fused_comm.diagnosis import Watch
from integration.errors import UsageError

FOLDER = "flight-recorder"
_DUMP = "rank"  # the analyser's prefix of file names, before the rank
_COLLECTIVES = "2000"
# Reports before a collective at the beginning of the step times out, which ends the watch.
_SHARE_OF_TIMEOUT = 0.9


def record_collectives(run: Path) -> None:
    """Enables torch's flight recorder, and NCCL's dumps into ``run`` on a timeout.

    Call it before a process group is created. Variables that are set already are not changed.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _COLLECTIVES)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(run / FOLDER / _DUMP))


class Watchdog(Watch):
    """A `Watch` that writes into the run folder; without hangs and errors it writes nothing.

    Args:
        run: the run folder.
        timeout: timeout of collectives, in seconds; steps that take 0.9 of it are reported.
    """

    def __init__(self, run: Path, *, timeout: float) -> None:
        super().__init__(_SHARE_OF_TIMEOUT * timeout, folder=run / FOLDER)
        if dist.get_backend() == "nccl":
            (run / FOLDER).mkdir(parents=True, exist_ok=True)  # NCCL does not create it

    def reports(self, error: BaseException) -> bool:
        """Returns whether an error that ends the run is reported; usage errors are not."""
        return not isinstance(error, UsageError)
