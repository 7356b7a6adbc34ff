"""Handles SIGTERM and SIGINT: the current step finishes, and a checkpoint is written."""

import signal
import time
from types import FrameType

# A shell's exit code for a process that SIGTERM ended; schedulers restart such a job.
EXIT_TERMINATED = 128 + signal.SIGTERM
# systemd and Slurm signal every process of a job, and the launcher forwards its signal, so that a
# rank gets two. Signals within this time are one request.
ONE_REQUEST_SECONDS = 2.0


class StopRequest:
    """Is ``requested`` after SIGTERM or SIGINT; the training loop checks it between steps."""

    def __init__(self) -> None:
        self.requested = False
        self._first = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first = True, now
        elif now - self._first > ONE_REQUEST_SECONDS:
            # A second request ends the process by the default action.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
