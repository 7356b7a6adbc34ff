"""On, off, and never half on."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import dtensor_rules
from dtensor_rules import patches, results
from dtensor_rules.planning import operators
from testkit import fake_mesh
from testkit.inspection.torch_snapshot import changes_by, importing

ADD = "aten::add.Tensor"


PROPAGATOR = "DTensor._op_dispatcher.sharding_propagator"


def test_import_changes_nothing_in_torch_and_disable_takes_all_back():
    imported, enabled, disabled, again, after = changes_by(
        importing("dtensor_rules"),
        "dtensor_rules.enable()",
        "dtensor_rules.disable()",
        "dtensor_rules.enable()",
        "dtensor_rules.disable(); dtensor_rules.disable()",
    )
    assert imported == disabled == after == []
    assert again == enabled
    kernels = [path for path in enabled if path.startswith("kernels of ")]
    assert f"kernels of {ADD}" in kernels
    assert [path for path in kernels if "_c10d_functional" in path] == [
        "kernels of _c10d_functional::all_gather_into_tensor",
        "kernels of _c10d_functional::all_gather_into_tensor_coalesced",
    ]
    strategies = [path for path in enabled if path.endswith(".expand_to_full_mesh_op_strategy")]
    assert "torch.distributed.tensor._ops.utils.expand_to_full_mesh_op_strategy" in strategies
    assert [path for path in enabled if path not in (*kernels, *strategies)] == [
        "DTensor's tp_getattr",
        f"{PROPAGATOR}[_propagate_tensor_meta_non_cached]",
        f"{PROPAGATOR}[register_op_strategy]",
        f"{PROPAGATOR}[register_sharding_prop_rule]",
        f"{PROPAGATOR}[register_single_dim_op_strategy]",
        "torch._C._clear_DTensor_sharding_propagator_cache",
        "torch.distributed.device_mesh.DeviceMesh._flatten",
        "torch.distributed.distributed_c10d._unregister_all_process_groups",
        "torch.distributed.distributed_c10d._unregister_process_group",
        "torch.distributed.tensor.DTensor.from_local",
        "torch.distributed.tensor.DTensor.redistribute",
        "torch.distributed.tensor.DTensor.to_local",
        "torch.distributed.tensor._dispatch.OpDispatcher.wrap",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec.__setattr__",
        "torch.distributed.tensor._op_schema._rebuild_tensor_from_dtensor_meta",
        "torch.distributed.tensor._redistribute._gen_transform_infos_non_cached",
        "torch.distributed.tensor._redistribute._optimize_transform_infos",
        "torch.distributed.tensor._sharding_prop.FakeTensorMode",
    ]


def has_kernel():
    return torch._C._dispatch_has_kernel_for_dispatch_key(ADD, "Python")


def state():
    """Everything of torch's that the library replaces."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return (
        has_kernel(),
        DTensorSpec.__setattr__,
        {name: id(value) for name, value in vars(propagator).items()},
        torch._C._clear_DTensor_sharding_propagator_cache,
        DTensor._op_dispatcher.wrap.__code__,
    )


@pytest.fixture(autouse=True)
def off():
    dtensor_rules.disable()
    yield
    dtensor_rules.disable()


def test_disable_restores_torch():
    before = state()
    assert not has_kernel()
    dtensor_rules.enable()
    assert has_kernel()
    assert state()[1] is not before[1]
    dtensor_rules.disable()
    assert state() == before


def test_twice_is_once():
    before = state()
    dtensor_rules.enable()
    dtensor_rules.enable()
    assert dtensor_rules.is_enabled()
    dtensor_rules.disable()
    assert not dtensor_rules.is_enabled()
    assert state() == before
    dtensor_rules.disable()
    assert state() == before


def test_a_block_leaves_things_as_it_found_them():
    with dtensor_rules.enabled():
        assert dtensor_rules.is_enabled()
    assert not dtensor_rules.is_enabled()
    dtensor_rules.enable()
    with dtensor_rules.enabled():
        pass
    assert dtensor_rules.is_enabled()


def test_the_block_ends_when_its_body_raises():
    with pytest.raises(KeyError), dtensor_rules.enabled():
        raise KeyError
    assert not dtensor_rules.is_enabled()


@pytest.mark.parametrize(
    "part",
    [(operators, "install_kernels"), (patches, "_watch_specs"), (results, "install")],
    ids=["kernels", "specs", "results"],
)
def test_a_failure_on_the_way_leaves_nothing_behind(part, monkeypatch):
    before = state()
    module, name = part
    real = getattr(module, name)

    def fails(*given):
        real(*given)
        raise OSError("no more")

    monkeypatch.setattr(module, name, fails)
    with pytest.raises(OSError, match="no more"):
        dtensor_rules.enable()
    assert not dtensor_rules.is_enabled()
    assert state() == before


def test_off_means_off():
    with fake_mesh((2,)) as mesh:
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with dtensor_rules.enabled():
            torch.neg(x)
        dtensor_rules.stats_clear()
        torch.neg(x)
    assert "aten.neg.default" not in dtensor_rules.stats()


def test_plain_tensors_never_meet_it():
    with dtensor_rules.enabled():
        dtensor_rules.stats_clear()
        torch.ones(2) + torch.ones(2)
        assert dtensor_rules.stats() == {}
