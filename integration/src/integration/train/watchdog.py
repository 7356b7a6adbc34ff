"""What each rank was doing when a run stood still: torch's flight recorder, and Python's stacks.

gloo notes its collectives in the flight recorder as NCCL does (c10d/FlightRecorder.hpp; torch 2.11
to 2.15), but only NCCL writes them by itself. Here every rank does, when a step has taken longer
than the time-out of collectives, also where it never came to a collective, and when it fails.
"""

import faulthandler
import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from integration.errors import UsageError
from integration.train.world import World

FOLDER = "flight-recorder"
_DUMP = "rank"  # the analyser takes what stands before the number as the files' prefix
_COLLECTIVES = "2000"


def record_collectives(run: Path) -> None:
    """Have torch keep the newest collectives, and NCCL dump them below ``run`` at a time-out.

    To be called before a process group is made; what the environment says already stays.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _COLLECTIVES)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(run / FOLDER / _DUMP))


class Watchdog:
    """Writes what this rank does into the run folder, if a step takes too long or fails.

    ``rankN`` is the flight recorder's dump, which ``python -m
    torch.distributed.flight_recorder.fr_trace FOLDER --prefix rank`` compares with those of other
    ranks; ``report-rankN.txt`` says in words why it was written, what the newest collective of
    each process group is, and where each thread stands. Nothing is written otherwise.

    Args:
        run: the run folder.
        world: this rank's place.
        seconds: that a step may take; more than once, for each that takes longer.
    """

    def __init__(self, run: Path, world: World, *, seconds: float) -> None:
        self._folder = run / FOLDER
        self._world = world
        self._seconds = seconds
        self._step = 0
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        """Start to watch; the first step is announced by ``step``."""
        if dist.get_backend() == "nccl":
            self._folder.mkdir(parents=True, exist_ok=True)  # it makes none
        self._thread.start()
        return self

    def step(self, number: int) -> None:
        """Note that the step of this number begins."""
        with self._changed:
            self._step = number
            self._deadline = time.monotonic() + self._seconds
            self._changed.notify()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the watch; an error that is not the user's is reported."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()
        if error is not None and not isinstance(error, UsageError):
            try:
                self.report(f"{type(error).__name__}: {error}")
            except OSError as unwritten:  # it must not take the place of what is reported
                error.add_note(f"no report of it could be written: {unwritten}")

    def report(self, why: str) -> None:
        """Write the dump, and add to the report."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{_DUMP}{self._world.rank}").write_bytes(c10d._dump_fr_trace())  # type: ignore[attr-defined]
        with (self._folder / f"report-{_DUMP}{self._world.rank}.txt").open("a") as file:
            rank = f"rank {self._world.rank} of {self._world.size}"
            print(f"{rank}, step {self._step}: {why}", *newest_collectives(), sep="\n", file=file)
            file.flush()
            faulthandler.dump_traceback(file)

    def _watch(self) -> None:
        with self._changed:
            while not self._ended:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                self._deadline = None
                self.report(f"it has not ended within {self._seconds:g} s")


def newest_collectives() -> list[str]:
    """Return a sentence for each process group: which of its collectives this rank started last.

    gloo does not note when a collective ends: a rank whose newest has a lower number than that of
    others is the one that these wait for.
    """
    trace = json.loads(c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
    newest = {tuple(entry["process_group"]): entry for entry in trace.get("entries", ())}
    now = time.time_ns()
    return [
        f"newest collective of group {name} ({description}): number"
        f" {entry['collective_seq_id'] or entry['p2p_seq_id']}, {entry['profiling_name']} of"
        f" {entry['input_dtypes']} {entry['input_sizes']}, started"
        f" {(now - entry['time_created_ns']) / 1e9:.1f} s ago"
        for (name, description), entry in newest.items()
    ]
