"""The report of a reducer's last step."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fused_comm import GradReducer
from fused_comm.grad_reducer import BucketReport, Report
from testkit import run_ranks

R, P, S0 = Replicate(), Partial(), Shard(0)


def test_hidden_and_exposed_times_are_computed_from_launches_and_waits():
    bucket = BucketReport(
        ("a",), "all-reduce over 2, float32", 2**20, 1, 1.0, ((3.0, 3.5), (4.0, 4.25))
    )
    assert bucket.exposed == 0.75
    assert bucket.hidden == 2.5  # in flight from 1 to 4.25
    assert BucketReport(("a",), "", 0, 0, 1.0, ()).hidden == 0.0


def test_the_table_has_a_row_per_bucket_and_a_total():
    report = Report(
        (
            BucketReport(("a", "b"), "all-reduce over 2, float32", 2**20, 1, 0.0, ((0.5, 1.0),)),
            BucketReport(("c",), "reduce-scatter over 2, half", 2**19, 2, 0.5, ()),
        )
    )
    assert str(report).splitlines() == [
        "bucket  gradients     MB  collectives  hidden ms  exposed ms  route",
        "     0          2  1.000            1     500.00      500.00  all-reduce over 2, float32",
        "     1          1  0.500            2       0.00        0.00  reduce-scatter over 2, half",
        " total          3  1.500            3     500.00      500.00",
    ]


def test_the_timeline_shows_waits(tmp_path):
    orange = "#ff7f0e"
    counts = []
    for waits in ((), ((0.1, 0.2), (0.3, 0.4))):
        path = tmp_path / "timeline.svg"
        Report((BucketReport(("a",), "", 8, 1, 0.0, waits),)).save_timeline(path)
        counts.append(path.read_text().count(orange))
    assert counts[1] == counts[0] + 2
    Report(()).save_timeline(tmp_path / "empty.png")


@pytest.mark.ranks
def test_a_reducer_reports_its_last_step():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        params = [
            torch.nn.Parameter(distribute_tensor(torch.zeros(64), mesh, [placement]))
            for placement in (R, R, S0)
        ]
        reducer = GradReducer([(f"p{n}", p) for n, p in enumerate(params)])
        assert reducer.report().buckets == ()
        for param in params:
            param.grad = DTensor.from_local(torch.ones(64), mesh, [P], run_check=False)
        reducer.finish()
        report = reducer.report()
        return [
            (bucket.names, bucket.route, bucket.nbytes, bucket.collectives)
            for bucket in report.buckets
        ], all(bucket.exposed >= 0 and bucket.hidden >= 0 for bucket in report.buckets)

    expected = [
        (("p2",), "reduce-scatter over 2, float32", 2 * 36 * 4, 1),
        (("p1", "p0"), "all-reduce over 2, float32", 132 * 4, 1),
    ]
    assert run_ranks(check, 2) == [(expected, True)] * 2


@pytest.mark.ranks
def test_waits_are_exposed_and_the_rest_is_hidden():
    """One step in which both ranks compute on, and one in which the other rank comes late."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        param = torch.nn.Parameter(distribute_tensor(torch.zeros(64), mesh, [R]))
        reducer = GradReducer([("w", param)])
        seconds = []
        for late, computes in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0)):
            dist.barrier()
            time.sleep(late * dist.get_rank())
            param.grad = None
            grad = DTensor.from_local(torch.ones(64), mesh, [P], run_check=False)
            reducer.accumulate(param, grad)  # sends it, from the second step on
            time.sleep(computes)
            reducer.finish()
            (bucket,) = reducer.report().buckets
            seconds.append((bucket.hidden, bucket.exposed))
        return seconds

    first, second = run_ranks(check, 2)
    for hidden, exposed in (first[1], second[1]):
        assert hidden > 0.9
        assert exposed < 0.5
    assert first[2][0] < 0.5
    assert first[2][1] > 0.5  # it waits until the other sends
