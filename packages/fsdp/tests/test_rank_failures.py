"""Ranks that skip modules or die: errors within the time-out, no wrong values, restarts."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp import fully_shard
from testkit import RankError, run_ranks

pytestmark = pytest.mark.ranks

TIMEOUT = 2  # seconds of the process groups here


class Blocks(nn.Module):
    """Blocks of one size, of which some are skipped."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.skipped = set()

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if i not in self.skipped:
                x = block(x)
        return x


def _sharded(mesh, **options):
    model = Blocks()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@contextmanager
def _mesh():
    """Yields a mesh of all ranks with a short time-out; all leave it together."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    dist.barrier()
    yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=("fsdp",))
    dist.barrier()


def _train(model):
    model(torch.ones(2, 4)).square().sum().backward()


def _error_of(model, skipped):
    """Returns the error of a step in which this rank skips some blocks, or none."""
    model.skipped = set(skipped)
    params = list(model.parameters())  # modules may be left with the unsharded ones
    before = [p.to_local().clone() for p in params]
    with pytest.raises(RuntimeError) as caught:
        _train(model)
    after = [p.to_local() for p in params]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    return str(caught.value)


SKIPS = {
    # which blocks ranks skip, after how many good steps, and the options; what both errors name
    "a block in the middle, first": ([], [1], 0, {}, "all_gather", (1, 2)),
    "a block in the middle, later": ([], [1], 1, {}, "all_gather", (1, 0)),
    "the last block": ([], [2], 0, {}, "all_gather", (2, 1)),
    "another block than others, first": ([1], [2], 0, {}, "all_gather", (2, 1)),
    "a block that stays gathered": (
        *([], [1], 1, {"reshard_after_forward": False}),
        *("reduce_scatter", (1, 0)),
    ),
}
FAST = ("a block in the middle, later", "a block that stays gathered")


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=[pytest.mark.slow] * (what not in FAST)) for what in SKIPS],
)
def test_skipped_module_is_an_error_that_names_the_collective(what):
    *skipped, good, options, collective, waiting = SKIPS[what]

    def check():
        with _mesh() as mesh:
            model = _sharded(mesh, **options)
            for _ in range(good):
                _train(model)
            return _error_of(model, skipped[dist.get_rank()])

    for rank, message in enumerate(run_ranks(check, 2)):
        block = f"'blocks.{waiting[rank]}.weight', 'blocks.{waiting[rank]}.bias' (2"
        assert message.startswith(f"DBuffer: {collective}")
        assert f" of {block}" in message
        assert f" over axis 'fsdp' of ranks [0, 1] failed on rank {rank}: " in message


@pytest.mark.parametrize("strategy", ["exchange", "native"])
def test_dbuffer_check_reports_different_collectives_on_all_ranks(strategy):
    def check():
        os.environ["DBUFFER_CHECK"] = "1"
        try:
            with _mesh() as mesh:
                model = _sharded(mesh, strategy=strategy)
                _train(model)
                return _error_of(model, [1] if dist.get_rank() == 1 else [])
        finally:
            del os.environ["DBUFFER_CHECK"]

    for message in run_ranks(check, 2):
        parts = message.split("the same collective, got: ")[1]
        assert "rank 0 starts DBuffer: all_gather of 'blocks.1.weight', 'blocks.1.bias' (" in parts
        assert "rank 1 starts DBuffer: all_gather of 'blocks.0.weight', 'blocks.0.bias' (" in parts


def test_missing_replica_is_an_error_that_names_the_axis():
    def check():
        timeout = timedelta(seconds=TIMEOUT)
        replicas = dist.new_group(timeout=timeout)
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        mesh = DeviceMesh.from_group(
            [replicas, alone], "cpu", [[0], [1]], mesh_dim_names=("replicate", "shard")
        )
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        loss = model(torch.ones(2, 4)).sum()
        dist.barrier()
        if dist.get_rank() == 0:
            message = (
                r"all_reduce of 'weight', 'bias' .* over axis 'replicate' of ranks \[0, 1\] fail"
            )
            with pytest.raises(RuntimeError, match=message):
                loss.backward()
        dist.barrier()

    run_ranks(check, 2)


def test_death_of_a_rank_is_an_error_that_names_the_collective():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        model = _sharded(mesh)
        if dist.get_rank() == 1:
            model.blocks[1].register_full_backward_pre_hook(
                lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            )
        _train(model)

    with pytest.raises(RankError) as caught:
        run_ranks(check, 2)
    reports = {report.rank: report for report in caught.value.reports}
    assert (reports[0].state, reports[1].state) == ("raised", "died")
    assert re.search(
        r"DBuffer: (all_gather|reduce_scatter) of 'blocks\.\d\.weight', 'blocks\.\d\.bias' .* "
        r"failed on rank 0: .*[Cc]onnection",
        reports[0].detail,
    )


def _torchrun(folder, *arguments):
    """Runs restarts.py on two ranks, with one restart."""
    folder.mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Else the second round finds in the agent's store where ranks of the first were listening.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    script = Path(__file__).with_name("restarts.py")
    done = subprocess.run(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            *["--max-restarts=1", str(script), str(folder), *arguments],
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def _script():
    path = Path(__file__).with_name("restarts.py")
    spec = importlib.util.spec_from_file_location("restarts", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _undisturbed(folder):
    script = _script()
    trainer = script.Trainer(folder)
    return {step: trainer.step(step) for step in range(script.STEPS)}


def _losses(folder, again, rank):
    lines = (folder / f"losses-{again}-{rank}.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


@pytest.mark.slow
def test_training_resumes_from_a_checkpoint_after_a_rank_is_killed(tmp_path):
    log = _torchrun(tmp_path / "killed", "3")
    assert "exitcode: -9" in log  # SIGKILL
    for rank, wanted in enumerate(run_ranks(_undisturbed, 2, tmp_path)):
        assert list(wanted) == list(range(6))
        before = _losses(tmp_path / "killed", 0, rank)
        after = _losses(tmp_path / "killed", 1, rank)
        assert list(before) == [0, 1, 2]
        assert list(after) == [2, 3, 4, 5]  # from the checkpoint of step 1
        assert before == {step: wanted[step] for step in before}
        assert after == {step: wanted[step] for step in after}
    survivor = json.loads((tmp_path / "killed" / "error-0.json").read_text())
    assert survivor["seconds"] < _script().TIMEOUT
    # which of the three groups it waited for depends on what rank 1 had sent before it died
    assert re.match(
        r"DBuffer: (all_gather|reduce_scatter) of '([012])\.0\.weight', '\2\.0\.bias' \(48 "
        r"elements of torch.float32\) over axis 0 of ranks \[0, 1\] failed on rank 0: .*"
        r"[Cc]onnection",
        survivor["error"],
    )
    assert not (tmp_path / "killed" / "error-1.json").exists()
