"""Starts a run under torchrun and observes its processes, progress and log."""

import json
import os
import re
import subprocess
import sys
from types import TracebackType
from typing import Self

import psutil  # type: ignore[import-untyped]

from integration.soak.options import SoakOptions
from integration.train.launch.watchdog import FOLDER
from integration.train.metrics import METRICS_FILE

# Otherwise torchrun (2.11 to 2.15) uses one store for all restarts, without a prefix for each
# (torch/distributed/rendezvous.py, elastic/rendezvous/dynamic_rendezvous.py): gloo's ranks find the
# addresses of dead ranks and fail to connect.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

_RESUMED = re.compile(r"resumed from (.+) at step (\d+)\n")


class Torchrun:
    """torchrun on this machine, for the length of a context.

    Args:
        options: options of the soak.
        run: name of the run and of its folder.
        restarts: ``--max-restarts`` of torchrun.
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
        """Starts torchrun."""
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
        """Kills torchrun; ranks end with it."""
        self._process.kill()
        self._process.wait()

    def exit_code(self) -> int | None:
        """Returns the exit code, or None while it runs."""
        return self._process.poll()

    def workers(self) -> dict[int, psutil.Process]:
        """Returns the processes of the running ranks."""
        found: dict[int, psutil.Process] = {}
        try:
            for child in psutil.Process(self._process.pid).children():
                if (rank := child.environ().get("RANK")) is not None:
                    found[int(rank)] = child
        except psutil.Error:  # one has just ended, and others may end too
            return {}
        return found

    def step(self) -> int:
        """Returns the number of completed steps, from the run folder."""
        path = self.folder / METRICS_FILE
        if not path.exists():
            return 0
        lines = path.read_bytes().splitlines(keepends=True)[-2:]
        complete = [line for line in lines if line.endswith(b"\n")]  # the last may be incomplete
        return int(json.loads(complete[-1])["step"]) if complete else 0

    def reports(self) -> dict[int, int]:
        """Returns the sizes of the watchdogs' reports, by rank."""
        reports = (self.folder / FOLDER).glob("report-rank*.txt")
        return {int(path.stem.removeprefix("report-rank")): path.stat().st_size for path in reports}

    def resumes(self) -> list[tuple[str, int]]:
        """Returns the checkpoint and the step of each resume."""
        return [(path, int(step)) for path, step in _RESUMED.findall(self.log.read_text())]
