"""A polite end: the signal is noted, the step finishes, a checkpoint is written."""

import signal
from types import FrameType

# What a shell reports for a process that SIGTERM ended: schedulers read it as "run me again".
EXIT_TERMINATED = 128 + signal.SIGTERM


class StopRequest:
    """Becomes ``requested`` when SIGTERM or SIGINT arrives; the loop asks between steps."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.requested = True
        # A second signal means it: let the default action end the process.
        signal.signal(number, signal.SIG_DFL)
