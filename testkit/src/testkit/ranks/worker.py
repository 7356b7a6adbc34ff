"""The process of one rank, started by `testkit.ranks.pool`.

Usage: ``python -m testkit.ranks.worker FD PARENT RANK PORT``.

Serves calls from the socket FD until its parent closes it or dies. Its stdout and stderr are the
rank's log file, emptied before each call.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no stubs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from testkit.mesh import clear_caches
from testkit.ranks.messages import DestroyGroup, RankCall, Ready, Reply, Task

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(fd: int, parent: int, rank: int, port: int) -> None:
    """Serves calls until the connection ends.

    Args:
        fd: the socket to the parent, inherited.
        parent: its process id.
        rank: this process's rank in every call.
        port: where the parent's TCPStore listens, on the loopback device.
    """
    _die_with(parent)
    os.set_inheritable(fd, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks a hung rank where
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    connection = Connection(fd)
    gc.freeze()  # what was imported stays: a collection after each call does not look at it
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed the pool
        while True:
            connection.send(Ready())
            call: RankCall = connection.recv()
            os.ftruncate(sys.stdout.fileno(), 0)
            connection.send(_serve(call, rank, dist.PrefixStore(f"call{call.number}", store)))
            assert connection.recv() == DestroyGroup()
            _reset()


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os._exit(1)


def _serve(call: RankCall, rank: int, store: dist.Store) -> Reply:
    sys.path[:] = call.sys_path
    with warnings.catch_warnings():
        try:
            reply = Reply(_dumps(_run(call, rank, store)))
        except BaseException:
            # SystemExit and pytest's own outcomes included: the pool must hear of every end.
            reply = Reply(None, _own_traceback())
    sys.stdout.flush()
    sys.stderr.flush()
    return reply


def _run(call: RankCall, rank: int, store: dist.Store) -> Any:
    task: Task = pickle.loads(call.payload)
    warnings.resetwarnings()
    for entry in reversed(task.warning_filters):
        warnings.filterwarnings(
            entry.action,  # type: ignore[arg-type]  # a literal, read from warnings.filters
            entry.message,
            entry.category,
            entry.module,
            entry.lineno,
        )
    random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=call.world_size)
    return task.fn(*task.args, **task.kwargs)


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, DTensor):
            raise TypeError(
                f"the result holds a DTensor ({obj.placements}), which means nothing outside its "
                "ranks; return x.to_local() or x.full_tensor()"
            )
        return super().reducer_override(obj)


def _dumps(result: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _ResultPickler(buffer).dump(result)
    except Exception as error:
        raise TypeError(
            f"the result, a {type(result).__name__}, cannot be sent back ({error}); "
            "return plain tensors, numbers, strings and containers of them"
        ) from error
    return buffer.getvalue()


def _own_traceback() -> str:
    """The current exception's, without the frames of this module at its head."""
    kind, error, frames = sys.exc_info()
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(kind, error, frames)).rstrip()


def _reset() -> None:
    if dist.is_initialized():  # the function may have destroyed it
        dist.destroy_process_group()
    clear_caches()
    # A mesh and its submeshes are a cycle that holds groups, and torch ends a group, its threads
    # and sockets, with its last holder. Now, on all ranks at once, and not in the middle of a later
    # call when a rank's collector comes by.
    gc.collect()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
