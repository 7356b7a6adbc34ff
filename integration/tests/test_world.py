"""How a rank ends, and which is the first of its host."""

from integration.train.launch.world import World
from testkit import run_python

ENDS = """
import sys
import torch
import torch.distributed as dist
from integration.train.launch.world import exit_process, process_group

with process_group(60):
    held = dist.group.WORLD  # as torch's caches of DTensor hold it
    for _ in range(500):  # more than gloo's threads can have let go of at the end
        dist.all_reduce(torch.ones(1000), async_op=True)
print("done", end="")
exit_process(7)
"""


def test_threads_that_hold_tensors_do_not_abort_a_rank_that_leaves():
    for _ in range(3):
        ended = run_python("-c", ENDS)
        assert (ended.returncode, ended.stdout) == (7, "done"), ended.stderr


def test_one_rank_of_each_host_is_its_first():
    assert [World(rank, 4, rank % 2).is_first_on_host for rank in range(4)] == [
        True, False, True, False,
    ]  # fmt: skip
    assert [World(rank, 2).is_first_on_host for rank in range(2)] == [True, False]
