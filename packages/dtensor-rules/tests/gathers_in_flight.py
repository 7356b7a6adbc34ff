"""Hundreds of all_gathers in flight: ``gathers_in_flight.py torch|enabled|disabled [--once]``.

With torch's own, both worker threads of the group finish one at once, again and again, and where
two cores are free the process dies of a broken heap within seconds (`cpu_gathers.cpp` says why).
While dtensor-rules is enabled it does not; ``disabled`` has torch's again. ``--once`` makes one,
and prints the operators of c10d that it calls.
"""

import sys

import torch
import torch.distributed as dist
from torch.profiler import profile

import dtensor_rules

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.set_num_threads(1)
if sys.argv[1] != "torch":
    dtensor_rules.enable()
if sys.argv[1] == "disabled":
    dtensor_rules.disable()

own = torch.ones(4)


def gathers(count):
    op, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    pending = [op.all_gather_into_tensor(own, 1, name) for _ in range(count)]
    return [op.wait_tensor(one) for one in pending]


if "--once" in sys.argv:
    with profile() as seen:
        gathers(1)
    print(*{event.name for event in seen.events() if event.name.startswith("c10d::")})
else:
    for _ in range(2000):
        assert all(torch.equal(whole, own) for whole in gathers(100))
