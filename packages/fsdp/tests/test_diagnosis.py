"""A hang under fully_shard is reported with the names of the group's parameters."""

import pytest

from testkit import run_ranks


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["exchange", "native"])
def test_hang_report_names_the_parameters_of_collectives(strategy, tmp_path):
    def run(out):
        import time
        from pathlib import Path

        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh

        from fsdp import fully_shard
        from fused_comm.diagnosis import Watch

        def late(*_):
            if dist.get_rank() == 1:
                time.sleep(1.2)

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
        for layer in model:
            fully_shard(layer, mesh=mesh, strategy=strategy)
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()  # ranks agree on their groups in the first
        model[0].register_full_backward_pre_hook(late)
        out = Path(out)
        with Watch(0.4, folder=out / "gather", patience=2) as watch:
            watch.step("forward")
            late()
            loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        with Watch(0.4, folder=out / "reduce", patience=2) as watch:
            watch.step("backward")
            loss.backward()
        # Past the time in which a rank may still report.
        dist.barrier()

    run_ranks(run, 2, str(tmp_path), timeout=60)
    gather, reduce = [
        (tmp_path / what / "report-rank0.txt").read_text() for what in ("gather", "reduce")
    ]
    assert "\n  called by dbuffer < fsdp < test_diagnosis.py:" in gather
    named = "\n  for DBuffer: all_gather of '0.weight', '0.bias' (24 elements of torch.float32)\n"
    assert named in gather
    assert "\n  for fsdp: the parameters 0.weight, 0.bias\n" in gather
    assert "\n  for module '0' of FSDPSequential\n" in gather
    assert "\nrank 1 is at (forward, it has not ended within 0.4 s) test_diagno" in gather
    if strategy == "native":
        assert "rank 1 did not reach number " in gather
        assert ", which others have started: rank 0 all_gather of Float [12], by dbuffer" in gather
    assert "\n  for a backward\n" in reduce
    assert "DBuffer: reduce_scatter of '0.weight', '0.bias' (24 elements of " in reduce
    assert "\n  for fsdp: the gradients of 0.weight, 0.bias\n" in reduce
