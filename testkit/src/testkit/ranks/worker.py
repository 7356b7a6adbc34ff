"""The ranks: ``python -m testkit.ranks.worker FD CALLER [MODULE...]`` is their fork server.

A rank, forked by it, runs calls from its connection until the caller closes it or dies. Its stdout
and stderr are the rank's log file, which is truncated before each call. Forked processes that are
not ranks run a `PythonCommand`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import os
import pickle
import random
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no stubs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from testkit.mesh import clear_caches
from testkit.ranks.forkserver import die_with_parent, serve
from testkit.ranks.messages import DestroyGroup, RankCall, Ready, Reply, StartRank, Task
from testkit.ranks.python_command import PythonCommand


def main(request: StartRank | PythonCommand, descriptors: Sequence[int]) -> None:
    """Runs what a process was forked for.

    Args:
        request: what that is.
        descriptors: of a rank, the file descriptor of its connection.
    """
    torch.set_num_threads(1)
    if isinstance(request, PythonCommand):
        request.run()
    else:
        _run_calls(request.rank, request.store_port, *descriptors)


def _run_calls(rank: int, port: int, fd: int) -> None:
    """Runs calls as this rank until the connection ends."""
    os.set_inheritable(fd, False)
    os.environ["TESTKIT_RANK"] = str(rank)
    faulthandler.enable()
    faulthandler.register(
        signal.SIGUSR1, all_threads=True
    )  # how the caller requests a hung rank's stack
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    connection = Connection(fd)
    modules = len(sys.modules)
    with contextlib.suppress(EOFError, ConnectionError):  # the caller has closed the pool
        while True:
            connection.send(Ready())
            call: RankCall = connection.recv()
            os.ftruncate(sys.stdout.fileno(), 0)
            connection.send(_reply_to(call, rank, dist.PrefixStore(f"call{call.number}", store)))
            assert connection.recv() == DestroyGroup()
            _reset()
            if len(sys.modules) > modules:  # the call has imported more
                gc.freeze()
                modules = len(sys.modules)


def _reply_to(call: RankCall, rank: int, store: dist.Store) -> Reply:
    sys.path[:] = call.sys_path
    with warnings.catch_warnings():
        try:
            reply = Reply(_dumps(_run(call, rank, store)))
        except BaseException:
            # SystemExit and pytest's outcomes included: the pool needs a reply in every case.
            reply = Reply(None, _traceback_of_function())
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
    backend = "gloo" if task.start_device is None else task.start_device(rank)
    random.seed(0)
    torch.manual_seed(0)  # of the device too
    dist.init_process_group(backend, store=store, rank=rank, world_size=call.world_size)
    return task.fn(*task.args, **task.kwargs)


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, DTensor):
            raise TypeError(
                f"expected a result without DTensors, which need their process group, got one with "
                f"placements {obj.placements}; return x.to_local() or x.full_tensor()"
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


def _traceback_of_function() -> str:
    """Formats the current exception without the first frames, which are of this module."""
    kind, error, frames = sys.exc_info()
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(kind, error, frames)).rstrip()


def _reset() -> None:
    # Kept until all that used them is gone: their last reference has to be Python's, which releases
    # the GIL. Destroyed by a C++ object that holds one, as DDP's reducer does, a group waits with
    # the GIL for its threads, and these may be waiting for the GIL to free a tensor.
    groups = list(dist.distributed_c10d._world.pg_map)
    if dist.is_initialized():  # the function may have destroyed it
        dist.destroy_process_group()
    clear_caches()
    # A mesh and its submeshes are a reference cycle with groups, and torch closes a group, its
    # threads and sockets, with its last reference. Collected here, this happens on all ranks at
    # once, instead of during a later call on one of them.
    gc.collect()
    groups.clear()


if __name__ == "__main__":
    descriptor, caller = map(int, sys.argv[1:3])
    os.set_inheritable(descriptor, False)
    die_with_parent(caller)
    # torch imports dynamo with the first operator on a DTensor: here once, instead of on each rank.
    for name in ("torch._dynamo", *sys.argv[3:]):
        importlib.import_module(name)
    serve(socket.socket(fileno=descriptor), main)
