"""A run under torchrun, seen from outside: its ranks' processes, its progress, what it says."""

import json
import os
import re
import subprocess
import sys
from types import TracebackType
from typing import Self

import psutil  # type: ignore[import-untyped]

from integration.metrics import METRICS_FILE
from integration.soak.options import SoakOptions
from integration.train.watchdog import FOLDER

# Otherwise torchrun (2.11 to 2.15) keeps one store through all restarts, without a prefix for each
# (torch/distributed/rendezvous.py, elastic/rendezvous/dynamic_rendezvous.py): gloo's ranks find the
# addresses of those that are dead, and do not come together.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

_RESUMED = re.compile(r"resumed from (.+) at step (\d+)\n")


class Torchrun:
    """torchrun on this machine, which ends with the context.

    Args:
        options: of the soak.
        run: name of the run, and of its folder.
        restarts: that torchrun may make.
    """

    def __init__(self, options: SoakOptions, run: str, *, restarts: int) -> None:
        self.ranks = options.ranks
        self.folder = options.out / run
        self.log = options.out / f"{run}.log"
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={options.ranks}", f"--max-restarts={restarts}"),
            *("-m", "integration.soak.rank", *options.train_arguments(run)),
        ]

    def __enter__(self) -> Self:
        """Start it."""
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | FRESH_STORE,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End what is left of it; ranks end with torchrun."""
        self._process.kill()
        self._process.wait()

    def exit_code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def workers(self) -> dict[int, psutil.Process]:
        """Return the processes of the ranks that run."""
        found: dict[int, psutil.Process] = {}
        try:
            for child in psutil.Process(self._process.pid).children():
                if (rank := child.environ().get("RANK")) is not None:
                    found[int(rank)] = child
        except psutil.Error:  # one has just ended: of this attempt there is nobody to rely on
            return {}
        return found

    def step(self) -> int:
        """Return the number of steps completed, as the run folder tells."""
        path = self.folder / METRICS_FILE
        if not path.exists():
            return 0
        lines = path.read_bytes().splitlines(keepends=True)[-2:]
        whole = [line for line in lines if line.endswith(b"\n")]  # the last may be half written
        return int(json.loads(whole[-1])["step"]) if whole else 0

    def reports(self) -> dict[int, int]:
        """Return the size of each rank's report by the watchdog, where there is one."""
        reports = (self.folder / FOLDER).glob("report-rank*.txt")
        return {int(path.stem.removeprefix("report-rank")): path.stat().st_size for path in reports}

    def resumes(self) -> list[tuple[str, int]]:
        """Return from which checkpoint and at which step the ranks have gone on, each time."""
        return [(path, int(step)) for path, step in _RESUMED.findall(self.log.read_text())]
