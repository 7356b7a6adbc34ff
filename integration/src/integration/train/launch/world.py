"""This process's rank, the world size, and the default process group."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from integration.device import CPU, Device
from integration.errors import UsageError
from integration.train.launch.endpoint import (
    INTERFACE_VARIABLE,
    choose_interface,
    endpoint_of_environment,
    first_line,
)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class World:
    """This process's rank and the world size.

    Attributes:
        local_rank: rank on its host; None if its launcher does not tell.
    """

    rank: int
    size: int
    local_rank: int | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    @property
    def is_first_on_host(self) -> bool:
        """Whether this rank is the first of its host, or of all where hosts are not known."""
        return self.is_main if self.local_rank is None else self.local_rank == 0


def declared_world() -> World:
    """Returns the world of torchrun's environment; one rank without torchrun."""
    local = os.environ.get("LOCAL_RANK")
    return World(
        rank=int(os.environ.get("RANK", "0")),
        size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=None if local is None else int(local),
    )


def has_agent() -> bool:
    """Returns whether torchrun's agent, or `launch`, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def process_group(
    timeout_seconds: float, *, join_seconds: float | None = None, device: Device = CPU
) -> Iterator[World]:
    """Creates the default process group for the length of the context.

    A process without other ranks gets a group of one.

    Args:
        timeout_seconds: timeout of collectives.
        join_seconds: timeout of the rendezvous of ranks that torchrun has not started; by default
            the same.
        device: that this rank starts, and whose backend of collectives the group has.

    Raises:
        UsageError: the ranks cannot join, or cannot connect to each other.
    """
    world = declared_world()
    timeout = timedelta(seconds=timeout_seconds)
    if has_agent():
        _end_with_launcher()
    device.start(world.local_rank, world.rank)
    if "RANK" in os.environ:
        _join(world, device.backend, timeout, timedelta(seconds=join_seconds or timeout_seconds))
    else:
        dist.init_process_group(
            device.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    try:
        yield world
    finally:
        dist.destroy_process_group()


def exit_process(exit_code: int) -> NoReturn:
    """Ends this process with ``exit_code``, without finalizing the interpreter.

    gloo's threads release tensors some time after their collective has ended, for which they take
    the GIL. While the interpreter finalizes, Python up to 3.13 ends a thread that requests the GIL,
    which aborts in C++ (pytorch/pytorch#190489). Destroying the process group does not end the
    threads, as torch's DTensor caches reference it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _join(world: World, backend: str, timeout: timedelta, join_timeout: timedelta) -> None:
    endpoint = endpoint_of_environment()
    choose_interface(endpoint)
    try:
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=join_timeout))
    except dist.DistError as error:
        raise UsageError(
            f"rank {world.rank} of {world.size} could not join the others at {endpoint} within"
            f" {join_timeout.total_seconds():g} s ({first_line(error)}); start all ranks, with the"
            " same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or start them with torchrun"
        ) from error
    try:
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )
    except RuntimeError as error:
        raise UsageError(
            f"rank {world.rank} of {world.size} joined and could not connect to the others over"
            f" interface {os.environ.get(INTERFACE_VARIABLE)} ({first_line(error)}); set"
            f" {INTERFACE_VARIABLE} to the interface by which its host reaches the others"
        ) from error


def _end_with_launcher() -> None:
    # Otherwise ranks would outlive a killed launcher, and write into the folder of a resumed run.
    # A launcher that has ended already is detected on joining, which uses its store.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
