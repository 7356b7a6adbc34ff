"""A hang under a plan is reported with the site, the entry and its line, and gradients by name."""

import pytest

from testkit import run_ranks


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_moves_and_gradients_are_named_by_the_plan(mode, tmp_path):
    def run(out):
        import time
        from pathlib import Path

        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Partial, Replicate, Shard

        from fused_comm.diagnosis import Watch
        from plan_api import Plan, parallelize

        def late(*_):
            if dist.get_rank() == 1:
                time.sleep(1.2)

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        moved = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        plan = Plan(mesh).shard("<in>", Shard(0), "dp")
        plan.redistribute("1.<in>", Shard(0), Replicate(), "dp", grad_src=Replicate())
        plan.annotate("<out>", Replicate(), "dp")
        parallelize(moved, plan, mode=mode)
        parallel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        plan = Plan(mesh).shard("<in>", Shard(0), "dp")
        plan.annotate("<out>", Shard(0), "dp")
        for name, _ in parallel.named_parameters():
            plan.annotate(f"{name}.grad", Partial(), "dp")
        parallelize(parallel, plan, mode=mode)
        parallel(torch.ones(4, 4)).sum().backward()  # learns which gradients come, and how
        out = Path(out)
        with Watch(0.4, folder=out / "move", patience=2) as watch, torch.no_grad():
            watch.step("forward")
            late()
            moved(torch.ones(4, 4))
        loss = parallel(torch.ones(4, 4)).sum()
        with Watch(0.4, folder=out / "reduce", patience=2) as watch:
            watch.step("backward")
            late()
            loss.backward()
        dist.barrier()

    run_ranks(run, 2, str(tmp_path), timeout=90)
    move, reduce = [
        (tmp_path / what / "report-rank0.txt").read_text() for what in ("move", "reduce")
    ]
    assert "plan_api < test_diagnosis.py:" in move
    assert "\n  for plan-api: 1.forward_pre:<in>:0, entry 1 of the plan (test_diagnosis.py:" in move
    assert "rank 1 did not reach number " in move
    assert "\n  called by fused_comm < plan_api < test_diagnosis.py:" in reduce
    assert "\n  for fused-comm: bucket of " in reduce
    assert ", with the gradients of 1." in reduce
    assert ", 0.weight" in reduce
    assert "\n  for a backward\n" in reduce
    assert "rank 1 did not reach number " in reduce
