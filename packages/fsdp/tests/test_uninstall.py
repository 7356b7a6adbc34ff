"""Import changes nothing in torch, `fully_shard` one hook, which `uninstall` removes."""

from testkit.inspection.torch_snapshot import changes_by, importing

HOOK = "torch.optim.optimizer._global_optimizer_pre_hooks[0]"

STALE = """
class SGD(torch.optim.SGD):  # torch replaces the step of a class at its first instance
    pass
stale = nn.Linear(4, 4)
old = SGD(stale.parameters(), lr=1.0)
fsdp.fully_shard(stale)  # registers the hook again
try:
    old.step()
except RuntimeError as error:
    assert "build the optimizer after fully_shard" in str(error)
else:
    raise AssertionError("no hook")
del stale, old
"""


def test_import_changes_nothing_in_torch_and_uninstall_restores_it():
    world = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
"""
    take_back = "fsdp.uninstall(); import gc; gc.collect(); ragged_shard.uninstall()"
    imported, placed, sharded, removed, again = changes_by(
        importing("fsdp", without=["fsdp.integrations.lightning"]) + world,
        "import ragged_shard; ragged_shard.install()",
        "model = fsdp.fully_shard(nn.Linear(4, 4)); fsdp.fully_shard(nn.Linear(4, 4))",
        "del model; fsdp.uninstall()\n" + take_back,
        STALE + take_back,
    )
    assert imported == removed == again == []
    assert sharded == sorted([*placed, HOOK])
