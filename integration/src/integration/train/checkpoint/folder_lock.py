"""Locks a run folder, so that only one job writes it.

Note [run folder lock]
    Rank 0 locks ``.lock`` in the run folder with flock(2). The kernel releases the lock when the
    process ends, so that there are no stale locks on a host. The file's content names the owner in
    the error of a second job. It also serves file systems whose locks are local to a host: an owner
    on another host is assumed to be running, unless it belongs to the same torchrun job
    (``--rdzv-id``), which ends its ranks before it starts them elsewhere.
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
from integration.train.folders import make_folder
from integration.train.launch.world import World

LOCK_FILE = ".lock"


@dataclass(frozen=True)
class LockOwner:
    """The job that writes a run folder.

    Attributes:
        host: host name of its rank 0.
        pid: process id of its rank 0.
        job: torchrun's job id; empty if none was given.
        since: local time.
    """

    host: str
    pid: int
    job: str
    since: str

    @staticmethod
    def this_process() -> "LockOwner":
        """Returns the owner entry of this process."""
        job = os.environ.get("TORCHELASTIC_RUN_ID", "")
        # torchrun's default id, which all jobs without an id share.
        job = "" if job == "none" else job
        return LockOwner(socket.gethostname(), os.getpid(), job, time.strftime("%Y-%m-%d %H:%M:%S"))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextmanager
def folder_lock(out: Path, world: World) -> Iterator[None]:
    """Prevents other jobs from writing ``out`` within the context; all ranks enter it.

    Raises:
        UsageError: on every rank, if another job writes it, or may write it on another host, or if
            the file system has no locks.
    """
    lock_file: TextIO | None = None
    refusal: str | None = None
    if world.is_main:
        try:
            lock_file = _acquire(out)
        except UsageError as error:
            refusal = str(error)
    refusals = [refusal]
    dist.broadcast_object_list(refusals)
    if refusals[0] is not None:
        raise UsageError(refusals[0])
    try:
        yield
    finally:
        if lock_file is not None:
            lock_file.truncate(0)  # removing it would race with processes that have opened it
            lock_file.close()


def _acquire(out: Path) -> TextIO:
    make_folder(out)
    path = out / LOCK_FILE
    try:
        file = path.open("a+")
        try:
            _lock(file, out, path)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise UsageError(
            f"{path} cannot be locked ({error.strerror}); correct that, or give an --out on another"
            " file system"
        ) from error
    return file


def _lock(file: TextIO, out: Path, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = _owner(file) or "another process"
        raise UsageError(
            f"another job writes {out} ({owner}); wait until it ends, or give another --out"
        ) from error
    before, this = _owner(file), LockOwner.this_process()
    if before is not None and before.host != this.host and (not this.job or before.job != this.job):
        raise UsageError(
            f"another job may write {out} ({before}), which cannot be checked from {this.host};"
            f" give another --out, or, if that job has ended, remove {path}"
        )
    file.truncate(0)
    file.write(json.dumps(asdict(this)))
    file.flush()


def _owner(file: TextIO) -> LockOwner | None:
    """Returns the owner in a lock file; None if it was released, or is being locked."""
    file.seek(0)
    text = file.read()
    try:
        return LockOwner(**json.loads(text))
    except (ValueError, TypeError):
        return None
