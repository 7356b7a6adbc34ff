"""What `parallelize` changes in torch for the process, and that `uninstall` restores it."""

import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

from plan_api import Plan, installed, parallelize
from testkit import fake_mesh
from testkit.models import TwoLinears

# In a process of its own, where nothing has been installed yet.
REVERSIBLE = """
import sys
import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer

def snapshot():
    dispatcher = DTensor._op_dispatcher
    tables = [dispatcher._custom_op_handlers, vars(dispatcher.sharding_propagator)]
    tables += [one for one in tables[1].values() if type(one) is dict]
    tables += [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    tables += [vars(torch.nn.init), vars(torch.nn.functional), vars(torch.Tensor)]
    return [dict(one) for one in tables]

def switched_on():
    import dist_rng, dtensor_rules
    return dist_rng.is_installed(), dtensor_rules.is_enabled()

before = snapshot()
import plan_api
assert snapshot() == before, "import plan_api changes torch"
from testkit import fake_mesh
from testkit.models import TwoLinears

mode, own = sys.argv[1], sys.argv[2] == "own"
if own:
    import dist_rng
    dist_rng.install()
with fake_mesh((2,), ("tp",)) as mesh:
    before = snapshot()
    for _ in range(2):
        plan = plan_api.Plan(mesh)
        plan_api.parallelize(TwoLinears(), plan, mode=mode, use=("dist-rng", "dtensor-rules"))
        parallelized = snapshot()
        assert parallelized != before
        assert switched_on() == (True, True)
        plan_api.uninstall()
        plan_api.uninstall()
        assert switched_on() == (own, False)
        after = snapshot()
        for one, other in zip(before, after):
            assert one == other, {key for key in {*one, *other} if one.get(key) != other.get(key)}
    plan_api.parallelize(TwoLinears(), plan, mode=mode, use=())
    assert switched_on() == (own, False)
"""


@pytest.mark.parametrize("own", ["own", "off"])
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_import_changes_nothing_and_uninstall_restores_torch(mode, own):
    """What the script had switched on by itself stays on."""
    result = subprocess.run(
        [sys.executable, "-c", REVERSIBLE, mode, own], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_removed_models_have_dtensors_and_no_hooks(mode):
    with fake_mesh((2,), ("tp",)) as mesh:
        plan = Plan(mesh).redistribute("<in>", Replicate(), Shard(0))
        model = parallelize(TwoLinears(), plan, mode=mode, guard_steps=0)
        model(torch.ones(4, 4))
        installed(model).remove()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            model(torch.ones(4, 4))


def test_rules_of_losses_are_back_behind_torchs_loss_parallel():
    """Which removes the handlers of these operators when it ends."""
    with fake_mesh((2,), ("tp",)) as mesh:
        logits = distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)], src_data_rank=None)
        parallelize(TwoLinears(), Plan(mesh))
        with loss_parallel():
            pass
        parallelize(TwoLinears(), Plan(mesh))
        with CommDebugMode() as collectives:
            torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3]))
    gathers = collectives.comm_counts[torch.ops.c10d_functional.all_gather_into_tensor]
    assert gathers == 0
