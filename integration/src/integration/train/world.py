"""This process's place among the ranks."""

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

from integration.errors import UsageError
from integration.train.addresses import INTERFACE_VARIABLE, choose_interface
from integration.train.rendezvous import join_ranks, rendezvous_endpoint
from integration.train.store_client import first_line

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class World:
    """The default process group, as two numbers."""

    rank: int
    size: int

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and speaks to the user."""
        return self.rank == 0


def declared_world() -> World:
    """Returns the world that torchrun's environment declares; one rank without torchrun."""
    return World(rank=int(os.environ.get("RANK", "0")), size=int(os.environ.get("WORLD_SIZE", "1")))


def has_agent() -> bool:
    """Returns whether torchrun, or our launcher, has started this process and looks after it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def process_group(timeout_seconds: float, *, join_seconds: float | None = None) -> Iterator[World]:
    """Joins the ranks for the length of the context; a lone process is a group of one.

    Args:
        timeout_seconds: to wait for other ranks in collectives.
        join_seconds: to wait for them here; by default as long.

    Raises:
        UsageError: the ranks cannot meet, or not connect to each other.
    """
    world = declared_world()
    timeout = timedelta(seconds=timeout_seconds)
    if has_agent():
        _end_with_launcher()
    if "RANK" in os.environ:
        _join(world, timeout, join_seconds or timeout_seconds)
    else:
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    try:
        yield world
    finally:
        dist.destroy_process_group()


def exit_process(exit_code: int) -> NoReturn:
    """Ends this process with ``exit_code``, without Python's own finalization.

    gloo's threads let go of a tensor some time after its collective has ended, and take the GIL for
    that. Once the interpreter finalizes, Python up to 3.13 ends a thread that asks for the GIL, and
    through C++ that is an abort (pytorch/pytorch#190489); destroying the group does not end the
    threads, for torch's caches of DTensor hold it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _join(world: World, timeout: timedelta, patience: float) -> None:
    # Where agents have met, theirs is the store; --hosts has several, each of one host.
    store = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = join_ranks(world.rank, world.size, patience)
    choose_interface(rendezvous_endpoint())
    try:
        dist.init_process_group(
            "gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )
    except RuntimeError as error:
        raise UsageError(
            f"rank {world.rank} of {world.size} met the others and could not connect to them over"
            f" interface {os.environ.get(INTERFACE_VARIABLE)} ({first_line(error)}); set"
            f" {INTERFACE_VARIABLE} to the one by which its host reaches theirs"
        ) from error


def _end_with_launcher() -> None:
    # Otherwise ranks outlive a launcher that was killed, and write beside the run that resumes
    # theirs. One that is gone already is noticed on joining: the ranks meet in its store.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
