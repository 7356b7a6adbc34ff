"""``python -m integration.soak.rank``: integration.train, which SIGUSR1 makes raise."""

import signal
from types import FrameType

from integration.train.__main__ import main
from integration.train.world import exit_process


def _raise(number: int, frame: FrameType | None) -> None:
    raise RuntimeError("the soak told this rank to raise")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _raise)
    exit_process(main())
