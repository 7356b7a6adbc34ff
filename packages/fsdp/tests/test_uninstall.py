"""What fsdp changes in torch: nothing by its import, one hook by `fully_shard`, undone."""

import subprocess
import sys

SCRIPT = """
import torch, torch.distributed as dist, torch.distributed.fsdp, torch.distributed.tensor
import torch._dynamo  # which itself replaces torch.manual_seed
from torch import nn
from torch.optim import optimizer

def snapshot():
    owners = [torch, torch.Tensor, nn.Module, optimizer.Optimizer, dist, torch.distributed.fsdp]
    owners += [torch.distributed.fsdp.FSDPModule, torch.distributed.tensor.DTensor]
    owners += [torch.nn.functional, torch.distributed.distributed_c10d]
    found = {(i, k): id(v) for i, o in enumerate(owners) for k, v in list(vars(o).items())
             if callable(v) and not k.startswith("_abc")}
    hooks = (*optimizer._global_optimizer_pre_hooks, *optimizer._global_optimizer_post_hooks)
    return found, hooks

def changed(before, after):
    return [k for k in before[0] if after[0].get(k) != before[0][k]], after[1]

before = snapshot()
import fsdp
assert changed(before, snapshot()) == ([], ())
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
model = fsdp.fully_shard(nn.Linear(4, 4))
assert len(snapshot()[1]) == 1  # the hook that is listed
fsdp.fully_shard(nn.Linear(4, 4))
assert len(snapshot()[1]) == 1
fsdp.uninstall()
assert snapshot()[1] == ()
fsdp.uninstall()
import gc, ragged_shard
del model
gc.collect()
ragged_shard.uninstall()
assert changed(before, snapshot()) == ([], ()), changed(before, snapshot())
stale = nn.Linear(4, 4)
old = torch.optim.SGD(stale.parameters(), lr=1.0)
fsdp.fully_shard(stale)  # registers it again
try:
    old.step()
except RuntimeError as error:
    assert "build the optimizer after fully_shard" in str(error)
else:
    raise AssertionError("no hook")
dist.destroy_process_group()
"""


def test_import_changes_nothing_in_torch_and_uninstall_takes_all_back():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
