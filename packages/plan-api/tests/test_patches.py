"""What `parallelize` changes in torch for the process, and that `uninstall` restores it."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import dist_rng
from plan_api import Plan, installed, parallelize
from testkit import fake_mesh
from testkit.inspection.torch_snapshot import changes_by, importing
from testkit.models import TwoLinears

MESH = """
import dist_rng, dtensor_rules
from testkit import fake_mesh
from testkit.models import TwoLinears
block = fake_mesh((2,), ("tp",))
plan = plan_api.Plan(block.__enter__())
def switched_on():
    return dist_rng.is_installed(), dtensor_rules.is_enabled()
"""
PARALLELIZE = """
plan_api.parallelize(TwoLinears(), plan, mode={mode!r}, use=("dist-rng", "dtensor-rules"))
assert switched_on() == (True, True)
"""
UNINSTALL = "plan_api.uninstall(); assert switched_on() == ({own}, False)"


@pytest.mark.parametrize(
    ("mode", "own"), [pytest.param("eager", False, marks=pytest.mark.slow), ("static", True)]
)
def test_import_changes_nothing_and_uninstall_restores_torch(mode, own):
    """What the script had switched on by itself stays on."""
    parallelize, uninstall = PARALLELIZE.format(mode=mode), UNINSTALL.format(own=own)
    imported, before, first, after_first, second, after_second, alone = changes_by(
        importing("plan_api"),
        MESH + ("dist_rng.install()" if own else ""),
        parallelize,
        uninstall,
        parallelize,
        f"{uninstall}; {uninstall}",
        f"plan_api.parallelize(TwoLinears(), plan, mode={mode!r}, use=())\n"
        f"assert switched_on() == ({own}, False); plan_api.uninstall()",
    )
    assert imported == []
    assert bool(before) is own
    assert first == second != before
    hooks = [path for path in first if "_global_optimizer" in path]
    assert bool(hooks) is (mode == "static")
    assert after_first == after_second == alone == before


@pytest.mark.slow
def test_uninstall_leaves_later_registrations():
    *_, without, restored = changes_by(
        "import plan_api, ragged_shard",
        MESH,
        PARALLELIZE.format(mode="eager") + "ragged_shard.install()",
        UNINSTALL.format(own=False),
        "ragged_shard.uninstall()",
    )
    assert without
    assert restored == []


def test_attention_stays_local_when_dist_rng_is_switched_off_and_on():
    """It is wrapped above dist-rng's."""
    dist_rng.install()
    with fake_mesh((2,), ("tp",)) as mesh:
        parallelize(TwoLinears(), Plan(mesh), use=("dist-rng",))
        heads = [
            distribute_tensor(torch.ones(2, 4, 3, 8), mesh, [Shard(1)], src_data_rank=None)
            for _ in range(3)
        ]
        for switch in (dist_rng.uninstall, dist_rng.install):
            switch()
            with sdpa_kernel(SDPBackend.MATH):  # which fails on DTensors
                F.scaled_dot_product_attention(*heads, is_causal=True)


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


def test_loss_handlers_are_restored_after_loss_parallel():
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
