"""One job at a time writes a run folder.

Note [lock]
    The lock is the kernel's (flock(2)) on ``.lock`` in the run folder, held by rank 0. It goes with
    that process however it ends, so a host has no stale locks. What the file says is for the
    sentence that refuses a second job, and for file systems whose locks do not reach other hosts:
    an owner on another host is believed, unless it was of the same torchrun job (``--rdzv-id``),
    which has ended its ranks before it starts them elsewhere.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from integration.errors import UsageError
from integration.paths import make_folder
from integration.train.world import World

LOCK_FILE = ".lock"


@dataclass(frozen=True)
class LockOwner:
    """Who writes a run folder.

    Attributes:
        host: its name.
        pid: of the job's rank 0 there.
        job: torchrun's id of the job, empty where nobody gave one.
        since: a local time.
    """

    host: str
    pid: int
    job: str
    since: str

    @staticmethod
    def this_process() -> "LockOwner":
        """Returns what this process writes into a lock."""
        job = os.environ.get("TORCHELASTIC_RUN_ID", "")
        # torchrun's default for all jobs that were not given an id.
        job = "" if job == "none" else job
        return LockOwner(socket.gethostname(), os.getpid(), job, time.strftime("%Y-%m-%d %H:%M:%S"))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextmanager
def folder_lock(out: Path, world: World) -> Iterator[None]:
    """Keeps other jobs from writing ``out`` for the length of the context; all ranks enter it.

    Raises:
        UsageError: on every rank: another job writes it, or may on another host, or the file system
            has no locks.
    """
    lock_file: TextIO | None = None
    refusal: str | None = None
    if world.is_main:
        try:
            lock_file = _take(out)
        except UsageError as error:
            refusal = str(error)
    told = [refusal]
    dist.broadcast_object_list(told)
    if told[0] is not None:
        raise UsageError(told[0])
    try:
        yield
    finally:
        if lock_file is not None:
            lock_file.truncate(0)  # nobody's; removing it would race with those who have opened it
            lock_file.close()


def _take(out: Path) -> TextIO:
    make_folder(out)
    path = out / LOCK_FILE
    try:
        file = path.open("a+")
        try:
            _own(file, out, path)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise UsageError(
            f"{path}, which keeps other jobs out, cannot be locked ({error.strerror}); mend that,"
            " or give an --out on another file system"
        ) from error
    return file


def _own(file: TextIO, out: Path, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        whose = _owner(file) or "another process"
        raise UsageError(
            f"another job writes {out} ({whose}); wait for its end, or give another --out"
        ) from error
    before, this = _owner(file), LockOwner.this_process()
    if before is not None and before.host != this.host and (not this.job or before.job != this.job):
        raise UsageError(
            f"another job may write {out} ({before}), and whether it lives cannot be seen from"
            f" {this.host}; give another --out, or, if it has ended, remove {path}"
        )
    file.truncate(0)
    file.write(json.dumps(asdict(this)))
    file.flush()


def _owner(file: TextIO) -> LockOwner | None:
    """Returns whom a lock names: nobody if it was released, or is just being taken."""
    file.seek(0)
    text = file.read()
    try:
        return LockOwner(**json.loads(text))
    except (ValueError, TypeError):
        return None
