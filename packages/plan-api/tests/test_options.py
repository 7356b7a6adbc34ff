"""Options of `parallelize`: each is in effect, or refused before anything is changed or sent."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from plan_api import Plan, deferred_init, options, parallelize
from testkit import CommLog, RankError, fake_mesh, run_ranks
from testkit.models import TwoLinears

R, S0 = Replicate(), Shard(0)


@pytest.fixture
def mesh():
    with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        yield mesh


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guard_steps": 1}, "expected mode='static' for guard_steps, got .*leave guard_steps out"),
        ({"guard_steps": -1, "mode": "static"}, "guard_steps expected 0 or more, got -1"),
        ({"guard_steps": "2", "mode": "static"}, "guard_steps expected an integer, got '2'"),
        ({"src_data_rank": 2}, "smallest has 2, got 2; give one below 2"),
        ({"src_data_rank": -1}, "smallest has 2, got -1"),
        ({"bucket_mb": 0}, "bucket_mb expected a number above 0, got 0"),
        ({"bucket_mb": 8, "use": ()}, "expected fused-comm for buckets, got bucket_mb=8 without"),
        ({"use": ("dist_rng",)}, "expected names among 'dist-rng', .*got 'dist_rng'"),
        ({"use": "dist-rng"}, "use= expected a sequence of 'dist-rng', .*got 'dist-rng'"),
    ],
    ids=str,
)
def test_options_without_effect_or_meaning_are_refused_first(mesh, options, message):
    model = TwoLinears()
    with CommLog() as log, pytest.raises(ValueError, match=message):
        parallelize(model, Plan(mesh), **options)
    assert log.calls == ()
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    assert not model._forward_pre_hooks


def test_a_package_that_is_not_installed_is_refused_with_the_command(mesh, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"got 'fused-comm', which is not: pip install .*comm"):
        parallelize(TwoLinears(), Plan(mesh), use=("fused-comm",))
    with pytest.raises(ValueError, match="expected fused-comm for buckets"):
        parallelize(TwoLinears(), Plan(mesh), bucket_mb=8.0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: model.requires_grad_(False), "no parameter requires a gradient"),
        (lambda model: model, "fully_shard reduces all gradients"),
    ],
    ids=["frozen", "fully_shard"],
)
def test_buckets_without_gradients_for_them_are_refused(mesh, change, why):
    plan = Plan(mesh).fully_shard("", "dp")
    with CommLog() as log, pytest.raises(ValueError, match=why):
        parallelize(change(TwoLinears()), plan, bucket_mb=8.0)
    assert log.calls == ()


@pytest.mark.ranks
def test_options_that_differ_between_ranks_are_an_error():
    def by_bucket():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize(TwoLinears(), Plan(mesh), bucket_mb=1.0 + mesh.get_rank())

    def by_use():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize(TwoLinears(), Plan(mesh), use=("fused-comm",) * mesh.get_rank())

    def by_fully_shard():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        rows = pytest.importorskip("fsdp").Rows(1 + mesh.get_rank())
        parallelize(TwoLinears(), Plan(mesh).fully_shard("", "dp", rows))

    def by_seed():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(mesh.get_rank())
        parallelize(deferred_init(nn.Linear, 4, 4), Plan(mesh))

    def by_function():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        rows = pytest.importorskip("fsdp").Rows(1 + mesh.get_rank())
        parallelize(TwoLinears(), Plan(mesh).fully_shard("", "dp", lambda param: rows))

    for call in (by_bucket, by_use, by_fully_shard, by_function, by_seed):
        with pytest.raises(RankError, match="differ") as error:
            run_ranks(call, 2)
        assert [report.state for report in error.value.reports] == ["raised", "raised"], call


@pytest.mark.parametrize("installed", [True, False])
def test_three_axes_without_dtensor_rules_are_a_warning(
    monkeypatch, installed, without_dtensor_rules
):
    monkeypatch.setattr(options, "find_spec", lambda name: installed or None)
    remedy = r"add 'dtensor-rules' to use=" if installed else r"pip install 'plan-api\[rules\]'"
    with fake_mesh((2, 2, 2), ("rep", "dp", "tp")) as mesh:
        with pytest.warns(UserWarning, match=rf"mesh has 3 axes, .* minutes .*{remedy}"):
            parallelize(TwoLinears(), Plan(mesh), use=())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize(TwoLinears(), Plan(mesh), mode="static", guard_steps=0, use=())
            parallelize(TwoLinears(), Plan(mesh["dp", "tp"]), use=())
