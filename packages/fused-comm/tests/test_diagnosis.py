"""Reports of hangs: which rank the others wait for, and for which tensors and modules."""

import pickle
import re
import time

import pytest
import torch.distributed as dist

from fused_comm.diagnosis import (
    RankSnapshot,
    RecordedCollective,
    Watch,
    compare_snapshots,
    take_snapshot,
)
from fused_comm.diagnosis.stack import CodeLocation, StackFrame, waits_for
from testkit import fake_mesh, run_ranks


def reports_of(script, folder, ranks=2):
    """Runs a script under a Watch of half a second; the reports and the results by rank."""

    def run(out):
        from fused_comm.diagnosis import Watch

        with Watch(0.5, folder=out, patience=3) as watch:
            watch.step("step 7")
            return script(watch)

    results = run_ranks(run, ranks, str(folder), timeout=60)
    return [(folder / f"report-rank{rank}.txt").read_text() for rank in range(ranks)], results


@pytest.mark.ranks
def test_a_late_rank_is_named_with_the_collective_of_a_module(tmp_path):
    def script(_):
        import time

        import torch
        import torch.distributed as dist
        from torch import nn

        class Normal(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))

            def forward(self):
                dist.all_reduce(self.scale.data)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Identity(), Normal())

            def forward(self):
                self.layers[1]()

        def long_computation():
            time.sleep(1.5)

        model = Model()
        if dist.get_rank() == 1:
            long_computation()
        model()

    (waiting, late), _ = reports_of(script, tmp_path)
    assert waiting.startswith("rank 0 of 2, step 7: it has not ended within 0.5 s\n  at ")
    assert "\n  called by test_diagnosis.py:" in waiting
    assert "\n  for all_reduce of parameter 'layers.1.scale'\n" in waiting
    assert "\n  for module 'layers.1' of Model\n" in waiting
    newest = "newest collective of group 0 (default_pg) of ranks [0, 1]: number"
    assert newest in waiting
    assert re.search(r", all_reduce of Double \[5\], started 0\.\d s ago by test_diag", waiting)
    assert " in long_computation: time.sleep(1.5)\n" in late
    for report in (waiting, late):
        assert "group 0 (default_pg) of ranks [0, 1]: rank 1 did not reach number " in report
        assert (
            ", which others have started: rank 0 all_reduce of Double [5], by test_diag" in report
        )
        assert "\nrank 0 is at (step 7, it has not ended within 0.5 s) " in report
        assert "\nrank 1 is at (step 7, it has not ended within 0.5 s) test_diag" in report
        assert "\nCurrent thread 0x" in report or "\nThread 0x" in report
    dump = pickle.loads((tmp_path / "rank0").read_bytes())
    assert dump["entries"][-1]["output_sizes"] == [[5]]


@pytest.mark.ranks
def test_a_bucket_of_gradients_is_named_by_its_parameters(tmp_path):
    def script(watch):
        import time

        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        from fused_comm import GradReducer

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        params = [
            torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
            for _ in range(2)
        ]
        reducer = GradReducer([("gate.weight", params[0]), ("up.weight", params[1])])
        x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
        for late in (0, 1.5):
            watch.step("step 7")  # the first makes plans, which may take long
            if dist.get_rank() == 1:
                time.sleep(late)
            (x @ params[0] @ params[1]).sum().backward()
            reducer.finish()

    (waiting, _), _ = reports_of(script, tmp_path)
    assert "\n  called by fused_comm < test_diagnosis.py:" in waiting
    assert (
        "bytes, all-reduce over 2, float32, with the gradients of up.weight, gate.weight\n"
        in waiting
    )
    assert "  for fused-comm: bucket of " in waiting
    assert "rank 1 did not reach number " in waiting
    assert "newest collective of group 0 (default_pg) of ranks [0, 1]: number " in waiting
    assert " by fused_comm < test_diagnosis.py:" in waiting


@pytest.mark.ranks
def test_a_redistribution_of_a_dtensor_in_backward(tmp_path):
    def script(watch):
        import time

        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(8), mesh, [Replicate()]).requires_grad_()
        factor = distribute_tensor(torch.ones(8), mesh, [Shard(0)])

        def scaled():
            return (x.redistribute(placements=[Shard(0)]) * factor).sum()

        scaled().backward()  # the first imports for longer than a step may take
        watch.step("step 7")
        loss = scaled()
        if dist.get_rank() == 1:
            time.sleep(1.5)
        loss.backward()

    (waiting, _), _ = reports_of(script, tmp_path)
    # ragged_shard is between them where another test has installed it in this process.
    assert re.search(r"\n  called by DTensor < (ragged_shard < )?test_diagnosis\.py:", waiting)
    assert (
        "  for redistribution of a DTensor of shape (8,) from (Shard(dim=0),) to (Replicate(),) on "
        "DeviceMesh((tp=2)" in waiting
    )
    assert "\n  for a backward\n" in waiting
    assert "rank 1 did not reach number " in waiting
    assert "rank 0 all_gather of Float [4], by DTensor < " in waiting


@pytest.mark.ranks
def test_ranks_that_start_different_collectives(tmp_path):
    def script(_):
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        group = dist.new_group(timeout=timedelta(seconds=3), group_desc="pair")
        x = torch.ones(5)
        try:
            if dist.get_rank() == 0:
                dist.all_reduce(x, group=group)
            else:
                dist.all_gather([x, x.clone()], x, group=group)
        except RuntimeError as error:
            return str(error)
        return ""

    reports, errors = reports_of(script, tmp_path)
    assert all(errors)
    for report in reports:
        differ = (
            "(pair) of ranks [0, 1]: ranks differ from number 1 on: rank 0 all_reduce of "
            "Float [5], by test_diagnosis.py:"
        )
        assert differ in report
        assert "; rank 1 all_gather of Float [5], by test_diagnosis.py:" in report
        assert "did not reach" not in report


@pytest.mark.ranks
def test_ranks_whose_tensors_have_different_shapes(tmp_path):
    # gloo takes a broadcast that is too short, and ends the process where it is too long.
    def script(_):
        import time

        import torch
        import torch.distributed as dist

        dist.broadcast(torch.ones(5)[: 3 + 2 * dist.get_rank()], 0)
        if dist.get_rank() == 1:
            time.sleep(1.2)
        dist.barrier()

    for report in reports_of(script, tmp_path)[0]:
        assert ": rank 0 broadcast of Float [3], by test_diagnosis.py:" in report
        assert "; rank 1 broadcast of Float [5], by test_diagnosis.py:" in report


@pytest.mark.ranks
def test_waiting_ranks_report_the_error_of_another_with_its_stack(tmp_path):
    def script():
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        class Loss:
            def _waits_for_(self):
                return "the loss of the batch"

            def compute(self):
                try:
                    raise KeyError("no such token")
                except KeyError as error:
                    raise ValueError("a bad batch") from error

        if dist.get_rank() == 1:
            Loss().compute()
        group = dist.new_group(timeout=timedelta(seconds=3))
        dist.all_reduce(torch.ones(2), group=group)

    def run(out):
        from fused_comm.diagnosis import Watch

        try:
            with Watch(0.5, folder=out, patience=0.5) as watch:
                watch.step("step 7")
                script()
        except (ValueError, RuntimeError) as error:
            return type(error).__name__
        return ""

    assert run_ranks(run, 2, str(tmp_path), timeout=60)[1] == "ValueError"
    waiting, failed = [(tmp_path / f"report-rank{rank}.txt").read_text() for rank in range(2)]
    assert failed.startswith("rank 1 of 2, step 7: ValueError: a bad batch\n  at ")
    assert ' in compute: raise KeyError("no such token")\n' in failed
    assert "\n  for the loss of the batch\n" in failed
    assert "all ranks:" not in failed
    assert "\nrank 1 is at (step 7, ValueError: a bad batch) test_diagnosis.py:" in waiting


@pytest.mark.ranks
def test_a_rank_that_continues_withdraws_its_snapshot(tmp_path):
    def script():
        import time

        import torch.distributed as dist

        from fused_comm.diagnosis import Watch

        slow = dist.get_rank() == 1
        with Watch(1, folder=out, patience=0) as watch:
            if slow:
                watch.step("slow")
                time.sleep(2)
                watch.step("the next")
            dist.barrier()
            if not slow:
                watch.report("somebody asks")
            dist.barrier()

    out = str(tmp_path)
    run_ranks(script, 2, timeout=60)
    report = (tmp_path / "report-rank1.txt").read_text()
    assert report.count("rank 1 of 2, slow: it has not ended within 1 s\n") == 1
    report = (tmp_path / "report-rank0.txt").read_text()
    assert report.startswith("rank 0 of 2: somebody asks\n")
    assert "\nrank 1 gave no answer: " in report


def test_reports_go_to_standard_error_without_a_folder(capsys):
    with fake_mesh((1,)), Watch(0.1, patience=0) as watch:
        watch.step("step 7")
        time.sleep(1)
        watch.report("somebody asks")
    printed = capsys.readouterr().err
    late = "rank 0 of 1, step 7: it has not ended within 0.1 s\n"
    assert printed.startswith(f"{late}  at test_diagnosis.py:")
    assert "rank 0 of 1, step 7: somebody asks\n" in printed


def test_nothing_is_written_while_steps_are_in_time(capsys, tmp_path):
    with fake_mesh((1,)), Watch(1.5, folder=tmp_path / "hangs") as watch:
        for number in range(4):
            watch.step(f"step {number}")
            time.sleep(0.5)
    assert not [*tmp_path.iterdir()]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [{"seconds": 0}, {"seconds": 1, "patience": -1}])
def test_times_that_are_not_positive_are_refused(arguments):
    with fake_mesh((1,)), pytest.raises(ValueError, match="expected seconds > 0"):
        Watch(**arguments)


def test_a_process_group_and_frames_are_required():
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"Watch: .*call init_process_group"):
        Watch(1)
    with pytest.raises(ValueError, match=r"take_snapshot: .*call init_process_group"):
        take_snapshot([])
    with fake_mesh((1,)), pytest.raises(ValueError, match="no frames"):
        take_snapshot([])


def test_an_error_in_waits_for_does_not_end_the_report():
    class Half:
        def _waits_for_(self):
            return self.names

        def wait(self):
            import sys

            return StackFrame(sys._getframe(), 1)

    (phrase,) = waits_for([Half().wait()])
    assert phrase.startswith("Half, whose _waits_for_ failed: AttributeError(")


def _snapshot(rank, *calls, world_size=3):
    location = CodeLocation("train.py", 5, "main")
    packages, phrases = ("train.py:5",), ("sums",)
    return RankSnapshot(rank, world_size, "step 1", "late", location, packages, phrases, calls)


def _call(number, operator="all_reduce", size=4, ranks=(0, 1, 2), group="0", is_p2p=False):
    sizes, dtypes, packages = ((size,),), ("Float",), ("trainer",)
    return RecordedCollective(
        group, "world", ranks, number, operator, sizes, dtypes, 1.0, packages, is_p2p
    )


def test_only_the_first_difference_of_a_group_is_reported():
    snapshots = [
        _snapshot(2, _call(3), _call(4, size=8), _call(5, "barrier"), _call(6)),
        _snapshot(0, _call(3), _call(4), _call(5)),
        _snapshot(1, _call(4), _call(5)),
    ]
    first, *rest = compare_snapshots(snapshots)
    assert first == (
        "group 0 (world) of ranks [0, 1, 2]: ranks differ from number 4 on: rank 0 all_reduce of "
        "Float [4], by trainer; rank 1 all_reduce of Float [4], by trainer; rank 2 all_reduce of "
        "Float [8], by trainer"
    )
    assert rest == [
        f"rank {rank} is at (step 1, late) train.py:5 in main (train.py:5); for sums"
        for rank in range(3)
    ]


def test_sizes_of_all_to_all_and_the_order_of_sends_are_not_compared():
    snapshots = [
        _snapshot(0, _call(1, "all_to_all", 3), _call(2, "send", is_p2p=True), world_size=2),
        _snapshot(1, _call(1, "all_to_all", 5), _call(2, "recv", is_p2p=True), world_size=2),
    ]
    assert compare_snapshots(snapshots)[0].startswith(
        "these ranks have started the same collectives"
    )


def test_ranks_outside_a_group_are_not_reported_as_behind():
    snapshots = [
        _snapshot(0, _call(1, ranks=(0, 2), group="a")),
        _snapshot(1),
        _snapshot(2, _call(1, ranks=(0, 2), group="a"), _call(2, ranks=(0, 2), group="a")),
    ]
    assert compare_snapshots(snapshots)[0] == (
        "group a (world) of ranks [0, 2]: rank 0 did not reach number 2, which others have "
        "started: rank 2 all_reduce of Float [4], by trainer"
    )


def test_ranks_without_a_snapshot_are_named():
    assert compare_snapshots([]) == []
    assert compare_snapshots([_snapshot(1)])[0].startswith("ranks 0, 2 gave no answer: dead, ")
    assert len(compare_snapshots([_snapshot(1)])) == 2


@pytest.mark.ranks
def test_collectives_of_a_destroyed_group_are_not_read_as_those_of_a_new_one():
    """torch's flight recorder keeps them, and each call has a default group in the same process."""

    def reduces(count):
        import torch
        import torch.distributed as dist

        from fused_comm.diagnosis.flight_recorder import recorded_collectives

        for _ in range(count):
            dist.all_reduce(torch.ones(2))
        return [one.number for one in recorded_collectives() if one.operator == "all_reduce"]

    assert run_ranks(reduces, 2, 3) == [[1, 2, 3]] * 2
    assert run_ranks(reduces, 2, 0) == [[]] * 2
    assert run_ranks(reduces, 2, 1) == [[1]] * 2
