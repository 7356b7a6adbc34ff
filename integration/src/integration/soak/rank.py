"""``python -m integration.soak.rank``: integration.train with a handler of SIGUSR1 that raises."""

import signal
from types import FrameType

from integration.train.__main__ import main
from integration.train.launch.world import exit_process


def _raise(number: int, frame: FrameType | None) -> None:
    raise RuntimeError("integration.soak made this rank raise")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _raise)
    exit_process(main())
