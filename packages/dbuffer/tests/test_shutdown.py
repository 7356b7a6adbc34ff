"""A process ends its collectives before its interpreter shuts down."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from dbuffer import _compat, shutdown
from dbuffer.collectives import Axis, Exchange
from testkit import run_ranks

SCRIPT = """
import atexit, sys, time
from pathlib import Path

rank, folder = int(sys.argv[1]), sys.argv[2]
leaving = Path(folder, "leaving")

def say_how_many():
    print(len(shutdown._alive), flush=True)

atexit.register(say_how_many)  # before all others, and so called after them

import torch, torch.distributed as dist
from dbuffer import _compat, shutdown

dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
if rank == 0:
    _compat.all_reduce(torch.ones(4), dist.ReduceOp.SUM, dist.group.WORLD)
    say_how_many()
    atexit.register(leaving.touch)
else:
    while not leaving.exists():
        time.sleep(0.01)
    _compat.all_reduce(torch.ones(4), dist.ReduceOp.SUM, dist.group.WORLD)
sys.exit(3)
"""


def test_a_process_that_exits_waits_for_what_is_in_flight(tmp_path):
    """Rank 1 takes part in rank 0's collective when rank 0 is leaving."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert printed == [["1", "0"], ["0"]]
    assert [rank.returncode for rank in ranks] == [3, 3]


def alive_in_the_end():
    end = time.monotonic() + 10
    while shutdown._alive and time.monotonic() < end:
        time.sleep(0.001)
    return len(shutdown._alive)


# How many tensors it has, and what starts it.
COLLECTIVES = {
    "all_gather": (2, lambda a, b, group: _compat.all_gather(a, b, group)),
    "reduce_scatter": (
        2,
        lambda a, b, group: _compat.reduce_scatter(a, b, dist.ReduceOp.SUM, group),
    ),
    "all_reduce": (1, lambda a, b, group: _compat.all_reduce(a, dist.ReduceOp.SUM, group)),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_that_has_ended_has_no_tensor(name):
    tensors, start = COLLECTIVES[name]

    def check():
        own, other = torch.ones(4), torch.ones(4)
        before = next(shutdown._number)
        work = start(own, other, dist.group.WORLD)
        assert next(shutdown._number) - before == tensors + 1
        work.wait()
        del work
        return alive_in_the_end()

    assert run_ranks(check, 1) == [0]


@pytest.mark.ranks
def test_an_exchange_that_has_ended_has_no_tensor():
    def check():
        flat, rank = torch.ones(4), dist.get_rank()
        axis = Axis("dp", dist.group.WORLD, (0, 1), rank)
        before = next(shutdown._number)
        finish = Exchange().all_reduce(flat, axis, average=False)
        assert next(shutdown._number) - before == 2 + 1
        finish()
        del finish
        return alive_in_the_end()

    assert run_ranks(check, 2) == [0, 0]
