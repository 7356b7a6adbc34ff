"""A polite end: the signal is noted, the step finishes, a checkpoint is written."""

import signal
import time
from types import FrameType

# What a shell reports for a process that SIGTERM ended: schedulers read it as "run me again".
EXIT_TERMINATED = 128 + signal.SIGTERM
# Whoever signals every process of a job (systemd, Slurm) reaches a rank twice: the launcher passes
# its own signal on. Signals this close together are one request.
ONE_REQUEST_SECONDS = 2.0


class StopRequest:
    """Becomes ``requested`` when SIGTERM or SIGINT arrives; the loop asks between steps."""

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
            # A second request means it: let the default action end the process.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
