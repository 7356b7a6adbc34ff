"""Watches for steps that take too long or fail, and reports what all ranks do then."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from fused_comm import _compat
from fused_comm.diagnosis.comparison import compare_snapshots
from fused_comm.diagnosis.rank_snapshot import RankSnapshot, take_snapshot
from fused_comm.diagnosis.stack import frames_of_error, frames_of_thread
from fused_comm.diagnosis.store_channel import StoreChannel

__all__ = ["Watch"]


class Watch:
    """Reports what this rank and the others do when a step takes too long or fails.

    Every rank has a Watch, whose thread sleeps until a deadline. Ranks exchange their reports
    through the store of the process group, which works when collectives do not. Use it after
    ``init_process_group``, in the thread that trains:

        with Watch(300, folder="hangs") as watch:
            for number, batch in enumerate(batches):
                watch.step(f"step {number}")
                ...

    Args:
        seconds: the longest time of a step; less than the time-out of the process group, so that
            the report is made before the error.
        folder: gets ``report-rankN.txt`` (with the stacks of all threads) and ``rankN``, the dump
            of the flight recorder, which ``python -m torch.distributed.flight_recorder.fr_trace
            FOLDER --prefix rank`` reads. By default the report goes to standard error.
        patience: seconds to wait for the reports of other ranks.

    Raises:
        ValueError: no process group, or seconds that are not positive.
    """

    def __init__(
        self, seconds: float, *, folder: str | Path | None = None, patience: float = 10.0
    ) -> None:
        if seconds <= 0 or patience < 0:
            raise ValueError(
                f"Watch: expected seconds > 0 and patience >= 0, got seconds={seconds!r}, "
                f"patience={patience!r}"
            )
        if not dist.is_initialized():
            raise ValueError("Watch: there is no process group; call init_process_group() first")
        self._seconds, self._patience = seconds, patience
        self._folder = None if folder is None else Path(folder)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._channel = StoreChannel()
        self._activity, self._published = "", False
        self._step = 0
        self._training_thread = 0
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        """Starts to watch this thread; `step` sets the first deadline."""
        self._training_thread = threading.get_ident()
        self._thread.start()
        return self

    def step(self, doing: str) -> None:
        """Starts a step, which has to end within ``seconds`` from now.

        Args:
            doing: the name of the step in reports, as ``"step 7"``.
        """
        with self._changed:
            published, self._activity, self._published = self._published, doing, False
            self._step += 1
            self._deadline = time.monotonic() + self._seconds
            self._changed.notify()
        if published:  # this rank continues, so its snapshot is no longer true
            with self._log_unreachable():
                self._channel.withdraw()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the watch; an error is reported, also to the ranks that wait for this one."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()
        if error is not None and self.reports(error):
            why = f"{type(error).__name__}: {error}"
            try:
                frames = frames_of_error(error)
                snapshot = take_snapshot(frames, activity=self._activity, reason=why)
                self._publish(snapshot, self._step)
            except OSError as unwritten:  # it must not replace the error that is reported
                error.add_note(f"no report of it could be written: {unwritten}")

    def reports(self, error: BaseException) -> bool:
        """Whether an error that ends the block is reported: all but exits of the process."""
        return isinstance(error, Exception)

    def report(self, why: str) -> None:
        """Reports what the training thread does now, and what the other ranks that report do.

        May be called from any thread; waits up to ``patience`` seconds for the other ranks.

        Args:
            why: the reason, which begins the report.
        """
        with self._changed:
            activity, step = self._activity, self._step
        frames = frames_of_thread(self._training_thread)
        snapshot = take_snapshot(frames, activity=activity, reason=why)
        self._publish(snapshot, step)
        snapshots = self._gather(snapshot)
        if self._folder is not None or min(snapshots) == self._rank:
            self._write("\n".join(["all ranks:", *compare_snapshots([*snapshots.values()])]))

    def _publish(self, snapshot: RankSnapshot, step: int) -> None:
        self._write(str(snapshot), stacks=True)
        # `step` waits for this lock: a snapshot published after it would never be withdrawn.
        with self._changed, self._log_unreachable():
            if self._step == step:
                self._published = True
                self._channel.publish(snapshot)

    def _gather(self, own: RankSnapshot) -> dict[int, RankSnapshot]:
        """Returns the snapshots of the ranks that answer in time, and this rank's, by rank."""
        snapshots = {self._rank: own}
        end = time.monotonic() + self._patience
        with self._log_unreachable():
            while len(snapshots) < self._size:
                snapshots |= self._channel.poll(snapshots.keys())
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
        return snapshots

    @contextmanager
    def _log_unreachable(self) -> Iterator[None]:
        """Reports that the host of the store, or the link to it, is gone, and continues."""
        try:
            yield
        except RuntimeError as error:
            self._write(f"rank {self._rank} cannot reach the other ranks: {error}")

    def _write(self, text: str, *, stacks: bool = False) -> None:
        if self._folder is None:
            print(text, file=sys.stderr, flush=True)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"rank{self._rank}").write_bytes(_compat.flight_recorder_dump())
        with (self._folder / f"report-rank{self._rank}.txt").open("a") as file:
            print(text, file=file, flush=True)
            if stacks:
                faulthandler.dump_traceback(file)

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._ended:
                    return
                remaining = None if self._deadline is None else self._deadline - time.monotonic()
                if remaining is None or remaining > 0:
                    self._changed.wait(remaining)
                    continue
                self._deadline = None
            self.report(f"it has not ended within {self._seconds:g} s")
