"""Notices that something takes too long, and has all ranks tell one another what they do."""

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
from fused_comm.diagnosis.board import Board
from fused_comm.diagnosis.compare import compare
from fused_comm.diagnosis.stack import levels_of_error, levels_of_thread
from fused_comm.diagnosis.stand import Stand, stand_of

__all__ = ["Watch"]


class Watch:
    """Reports what this rank, and the others, do when a step takes too long or fails.

    All ranks watch, each with a thread that sleeps. What ranks do they tell one another through the
    store of the process group, which works when collectives do not. Use it where there is a process
    group, in the thread that trains:

        with Watch(300, folder="hangs") as watch:
            for number, batch in enumerate(batches):
                watch.step(f"step {number}")
                ...

    Args:
        seconds: that what is announced by `step` may take; less than the time-out of the process
            group, so that the report is there before the error.
        folder: for ``report-rankN.txt`` (with the stacks of all threads) and ``rankN``, the flight
            recorder's dump, which ``python -m torch.distributed.flight_recorder.fr_trace FOLDER
            --prefix rank`` reads. By default the report goes to standard error.
        patience: seconds to wait for the reports of other ranks.

    Raises:
        ValueError: no process group, or seconds that are not positive.
    """

    def __init__(
        self, seconds: float, *, folder: str | Path | None = None, patience: float = 10.0
    ) -> None:
        if seconds <= 0 or patience < 0:
            raise ValueError(
                f"Watch: seconds={seconds!r} has to be positive, patience={patience!r} not negative"
            )
        if not dist.is_initialized():
            raise ValueError("Watch: there is no process group; call init_process_group() first")
        self._seconds, self._patience = seconds, patience
        self._folder = None if folder is None else Path(folder)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._board = Board()
        self._doing, self._told = "", False
        self._step = 0
        self._trains = 0
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        """Begins to watch this thread; the first deadline is set by `step`."""
        self._trains = threading.get_ident()
        self._thread.start()
        return self

    def step(self, doing: str) -> None:
        """Says what begins now, and has ``seconds`` from here on."""
        with self._changed:
            told, self._doing, self._told = self._told, doing, False
            self._step += 1
            self._deadline = time.monotonic() + self._seconds
            self._changed.notify()
        if told:  # this rank goes on: what it did is no news
            with self._reaching_others():
                self._board.take_back()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the watch; an error is reported, to those as well that wait."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()
        if error is not None and self.reports(error):
            why = f"{type(error).__name__}: {error}"
            try:
                stand = stand_of(levels_of_error(error), doing=self._doing, why=why)
                self._tell(stand, self._step)
            except OSError as unwritten:  # it must not take the place of what is reported
                error.add_note(f"no report of it could be written: {unwritten}")

    def reports(self, error: BaseException) -> bool:
        """Whether an error that ends the block is reported: those that are no exit."""
        return isinstance(error, Exception)

    def report(self, why: str) -> None:
        """Reports what the thread that trains does now, and what other ranks do that report.

        From any thread; it waits for others as long as ``patience`` says.
        """
        with self._changed:
            doing, step = self._doing, self._step
        stand = stand_of(levels_of_thread(self._trains), doing=doing, why=why)
        self._tell(stand, step)
        stands = self._all(stand)
        if self._folder is not None or min(stands) == self._rank:
            self._write("\n".join(["all ranks:", *compare([*stands.values()])]))

    def _tell(self, stand: Stand, step: int) -> None:
        self._write(str(stand), stacks=True)
        # `step` waits for this: what is put behind its back would never be taken back.
        with self._changed, self._reaching_others():
            if self._step == step:
                self._told = True
                self._board.put(stand)

    def _all(self, own: Stand) -> dict[int, Stand]:
        """What the ranks do that answer in time, this one among them."""
        stands = {self._rank: own}
        end = time.monotonic() + self._patience
        with self._reaching_others():
            while len(stands) < self._size:
                stands |= self._board.news(stands.keys())
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
        return stands

    @contextmanager
    def _reaching_others(self) -> Iterator[None]:
        """Says so where the store's host is gone, as after the death of its rank or a cut link."""
        try:
            yield
        except RuntimeError as error:
            self._write(f"rank {self._rank} cannot reach the other ranks: {error}")

    def _write(self, text: str, *, stacks: bool = False) -> None:
        if self._folder is None:
            print(text, file=sys.stderr, flush=True)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"rank{self._rank}").write_bytes(_compat.flight_dump())
        with (self._folder / f"report-rank{self._rank}.txt").open("a") as file:
            print(text, file=file, flush=True)
            if stacks:
                faulthandler.dump_traceback(file)

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._ended:
                    return
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                self._deadline = None
            self.report(f"it has not ended within {self._seconds:g} s")
