"""Canaries: each difference between versions of torch, or private name, that `_compat` relies on.

When one of these tests fails, torch has changed: the shim that it names can go, or must change.
"""

import importlib.metadata
import inspect
import logging
import re
import types
from pathlib import Path

import pytest
import torch
import torch.compiler.config
import torch.distributed as dist
import torch.distributed.config
from torch._logging import warning_once
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _api,
    _collective_utils,
    _op_schema,
    _redistribute,
    _sharding_prop,
    _utils,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.placement_types import Placement

from dtensor_rules import _compat
from testkit import CommLog, fake_mesh

RELEASE = _compat.RELEASE
aten = torch.ops.aten


@pytest.fixture
def mesh():
    with fake_mesh((2,)) as mesh:
        yield mesh


def spec(mesh, *placements, ordered=None):
    meta = TensorMeta(torch.Size((8, 4)), (4, 1), torch.float32)
    return DTensorSpec(mesh, placements, tensor_meta=meta, use_strided_shard_as_shard_order=ordered)


def test_every_shim_has_a_canary_here():
    here = Path(__file__).read_text()
    for name, member in vars(_compat).items():
        if inspect.isfunction(member) and member.__module__ == _compat.__name__:
            assert f"_compat.{name}(" in here, name


@pytest.mark.parametrize(
    ("shim", "needed_before"),
    [
        ("checked_outs", (2, 13)),  # only one argument, by name
        ("gradient_argument", (2, 12)),  # the keyword that is missing
        ("partial_second_stays", (2, 12)),  # False
        ("redistribute_context", (2, 13)),  # the old names
        ("compiles_for_other_ranks", (2, 14)),  # the flag's old place
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_torch_that_needs_the_shim_is_still_supported(shim, needed_before):
    assert callable(getattr(_compat, shim))
    (wanted,) = (
        requirement
        for requirement in importlib.metadata.requires("dtensor-rules")
        if requirement.startswith("torch")
    )
    oldest = re.search(r">=(\d+)\.(\d+)", wanted)
    assert tuple(map(int, oldest.groups())) < needed_before, f"simplify _compat.{shim}"


def test_versions_of_torch_begin_with_major_and_minor():
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", torch.__version__)
    assert _compat.minor("2.13.0+cpu") == "2.13"


def test_another_minor_version_is_refused_with_the_remedy():
    _compat.require_torch("2.13.0+cpu", "2.13.1")
    with pytest.raises(ImportError, match=r"compiled for torch 2\.13 and finds torch 2\.14\.0a"):
        _compat.require_torch("2.13.0", "2.14.0a")


def test_torch_ends_groups_by_these_functions():
    source = inspect.getsource(dist.destroy_process_group)
    assert all(f"        {name}(" in source for name in _compat.UNREGISTER)


def tables_of_operators():
    """The propagator's dicts from operators, by name."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return {
        name: table
        for name, table in vars(propagator).items()
        if isinstance(table, dict) and all(isinstance(key, torch._ops.OpOverload) for key in table)
    }


def test_torch_keeps_operators_in_these_tables():
    strategies = ["op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules"]
    infos = {"op_to_schema_info", "op_to_schema_info_for_single_dim_strategy"}
    # How arguments and shapes are made local: torch's propagation reads them. 2.11 has only one.
    others = {
        "op_to_scalar_shape_adjuster",
        "op_to_shape_and_stride_idx",
        "squeeze_op_to_dims_variant",
    }
    tables = tables_of_operators()
    assert {*strategies, *infos} <= set(tables) <= {*strategies, *infos, *others}
    found = _compat.strategy_tables()
    assert [id(table) for table in found] == [id(tables[name]) for name in strategies]


def test_the_schema_info_is_the_one_that_torch_takes(mesh):
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    tables = tables_of_operators()
    first = tables["op_to_schema_info"]
    second = tables["op_to_schema_info_for_single_dim_strategy"]
    unwrap = DTensor._op_dispatcher.unwrap_to_op_info
    cases = ((aten.mul.Tensor, (x, x)), (aten.t.default, (x,)), (aten.cat.default, ([x, x],)))
    for op, args in cases:
        assert _compat.schema_info(op) is unwrap(op, args, {}).schema.schema_info
    assert _compat.schema_info(aten.t_copy.default) is None
    if RELEASE >= (2, 12):  # the second is there before, and empty
        only_second = [op for op in second if op not in first]
        assert only_second, "one table is enough"
        assert isinstance(_compat.schema_info(only_second[0]), RuntimeSchemaInfo)


def test_torch_keeps_decisions_in_a_cache_of_its_own_in_cpp(mesh):
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    count = torch._C._get_DTensor_sharding_propagator_cache_stats
    _compat.forget_decisions()
    torch.neg(x)
    before = count()
    torch.neg(x)
    assert count() != before, "a hit is counted"
    _compat.forget_decisions()
    assert count() == (0, 0)
    propagator = DTensor._op_dispatcher.sharding_propagator
    assert propagator.propagate_op_sharding.cache_info().currsize == 0


@pytest.mark.parametrize("name", ["_gen_transform_infos_non_cached", _compat.MERGE])
def test_torch_redistributes_by_these_functions(mesh, monkeypatch, name):
    native, asked = getattr(_redistribute, name), []
    monkeypatch.setattr(_redistribute, name, lambda *a, **k: asked.append(name) or native(*a, **k))
    src, dst = spec(mesh, Shard(0)), spec(mesh, Replicate())
    monkeypatch.setattr(_redistribute, "_are_we_tracing", lambda: True)  # or it asks its cache
    _redistribute.redistribute_local_tensor(torch.ones(4, 4), src, dst)
    assert asked == [name]
    assert _compat.redistribution_transforms(src, dst)


def test_torch_asks_the_placement_of_a_transform_over_several_axes_to_gather():
    class Gathered(Placement):
        def __eq__(self, other):
            return self is other

        def __hash__(self):
            return id(self)

        def is_shard(self, dim=None):
            return True

        def _to_replicate_tensor(self, local, mesh, axis, shape):
            return local + 1

    assert _compat.is_tracing() is False
    with fake_mesh((2, 2)) as square, pytest.MonkeyPatch.context() as patch:
        transform = _compat.transform_of_axes(Gathered(), square, (0, 1))
        patch.setattr(_redistribute, _compat.MERGE, lambda *_: [transform])
        src, dst = spec(square, Shard(0), Shard(1)), spec(square, Replicate(), Replicate())
        assert _redistribute.redistribute_local_tensor(torch.ones(2, 2), src, dst).sum() == 8


def test_torch_s_own_function_merges_transforms():
    assert _compat.merged_by_torch.__name__ == _compat.MERGE
    assert _compat.merged_by_torch.__module__ == _redistribute.__name__


def test_torch_refuses_mixed_partials_before_it_plans():
    with fake_mesh((2, 2)) as square:
        mixed = spec(square, Partial("sum"), Partial("max"))
        whole = spec(square, Replicate(), Replicate())
        with pytest.raises(ValueError, match="Mixed Partial") as by_torch:
            _redistribute.redistribute_local_tensor(torch.ones(8, 4), mixed, whole)
        with pytest.raises(ValueError, match=re.escape(str(by_torch.value))):
            _compat.redistribution_transforms(mixed, whole)
        # It is the check that says so, not the plan.
        assert _redistribute._gen_transform_infos_non_cached(mixed, whole)
        with pytest.raises(ValueError, match=re.escape(str(by_torch.value))):
            _utils.assert_no_mixed_partial_types(mixed.placements)


def test_torch_s_planners_stay_in_a_cache_without_bound():
    with fake_mesh((2, 2)) as square:
        _redistribute._planner_cache.clear()
        src, dst = spec(square, Shard(0), Shard(0)), spec(square, Replicate(), Shard(0))
        actual = _compat.redistribution_transforms(src, dst)
        assert len(_redistribute._planner_cache) == 0
        native = _redistribute._gen_transform_infos_non_cached(src, dst)
        assert len(_redistribute._planner_cache) == 1, "the shim need not clean up"
        assert actual == native
        assert _compat.redistribution_transforms(src, dst) == native
        assert len(_redistribute._planner_cache) == 1  # torch's own stays


def test_torch_merges_collectives_over_a_flattened_mesh():
    with fake_mesh((2, 2)):
        named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        src, dst = spec(named, Partial(), Partial()), spec(named, Replicate(), Replicate())
        assert _compat.flattened_mesh(named, (0, 1)) is None
        assert _compat.flattenings(named["a"]) == 0
        flattened = named._flatten("ab")
        assert _compat.flattened_mesh(named, (0, 1)) is flattened
        assert _compat.flattenings(named["a"]) == 1
        apart = _compat.redistribution_transforms(src, dst)
        given = apart, named, src.placements, dst.placements
        assert (len(apart), len(_compat.merged_by_torch(*given))) == (2, 1)
        assert _compat.merges_transforms()
        with _redistribute.disable_redistribute_transform_optimization():
            assert not _compat.merges_transforms()
            assert len(_compat.merged_by_torch(*given)) == 2


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_default_group_says_which_tensors_it_sends(device_type):
    with fake_mesh((2, 2), device_type=device_type) as square:
        name = dist.distributed_c10d._get_default_group().group_name
        assert _compat.default_group(square) == name
        other = DeviceMesh("meta", square.mesh, _init_backend=False, _rank=0)
        assert _compat.default_group(other) is None


def test_the_default_group_has_the_mesh_s_ranks_in_their_order():
    with fake_mesh((2, 2)) as square:
        turned = DeviceMesh("cpu", square.mesh.T, _init_backend=False, _rank=0)
        part = DeviceMesh("cpu", square.mesh[:1], _init_backend=False, _rank=0)
        assert _compat.default_group(turned) is None
        assert _compat.default_group(part) is None


def test_torch_keeps_the_active_explicit_context_in_a_local_of_its_class():
    local = _compat.explicit_redistribution_only()
    assert getattr(local, "_active", None) is None
    with _utils.ExplicitRedistributionContext() as context:
        assert local._active is context
    assert local._active is None


def test_torch_may_compile_on_one_rank_for_all():
    assert _compat.compiles_for_other_ranks() is False
    flags = torch.compiler.config if RELEASE >= (2, 14) else torch.distributed.config
    with flags.patch(compile_on_one_rank=True):
        assert _compat.compiles_for_other_ranks() is True


def test_a_replica_plus_a_partial_sum(mesh):
    placed = (
        DTensor.from_local(torch.ones(4), mesh, [placement], run_check=False)
        for placement in (Replicate(), Partial())
    )
    assert torch.add(*placed).placements[0].is_partial() is _compat.partial_second_stays()


def test_torch_gathers_on_the_cpu_instead_of_an_all_to_all_and_says_so_once(mesh, caplog):
    message = "CPU process group does not support alltoall yet"
    with caplog.at_level(logging.WARNING, _collective_utils.logger.name):
        warning_once.cache_clear()
        with CommLog() as log:
            _collective_utils.shard_dim_alltoall(torch.ones(4, 4), 0, 1, mesh, 0)
        assert log.counts() == {"all_gather": 1}
        assert _compat.all_to_all_gathers(mesh) is True
        assert caplog.text.count(message) == 1
        warning_once.cache_clear()
        assert _compat.all_to_all_gathers(mesh) is True
        assert caplog.text.count(message) == 2
        _collective_utils.shard_dim_alltoall(torch.ones(4, 4), 0, 1, mesh, 0)
        assert caplog.text.count(message) == 2
    cuda = types.SimpleNamespace(device_type="cuda")
    assert _compat.all_to_all_gathers(cuda) is False
    warning_once.cache_clear()


@pytest.mark.parametrize("placement", [Partial(), Shard(0), Replicate()], ids=str)
def test_the_gradient_that_from_local_wants(mesh, placement, monkeypatch):
    wanted = _compat.gradient_placements((placement,))
    assert wanted == ((Replicate() if placement.is_partial() else placement),)
    local = torch.ones(4, 4, requires_grad=True)
    made = DTensor.from_local(local, mesh, (placement,), run_check=False)
    given = DTensor.from_local(torch.ones(4, 4), mesh, wanted, run_check=False)
    native, asked = _api._normalize_placements_for_grad, []
    monkeypatch.setattr(
        _api, "_normalize_placements_for_grad", lambda own: asked.append(own) or native(own)
    )
    made.backward(given)
    assert asked == [(placement,)]


def test_from_local_takes_placements_of_its_gradient():
    assert _compat.gradient_argument(None) == {}
    (name,) = _compat.gradient_argument((Replicate(),))
    assert (name in inspect.signature(DTensor.from_local).parameters) is (RELEASE >= (2, 12))


class Context(types.SimpleNamespace):
    def set_materialize_grads(self, value):
        assert value is False


def test_what_redistribute_leaves_for_its_backward(mesh):
    context = Context()
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    dtype = torch.float32
    both = {"op_dtype": dtype, "out_dtype": dtype}
    dtypes = [{**both, "backward_options": both}] if RELEASE >= (2, 13) else []
    _redistribute.Redistribute.forward(context, x, mesh, (Replicate(),), False, *dtypes)
    actual = vars(_compat.redistribute_context(x._spec, dtype))
    native = vars(context)
    assert {name: actual[name] for name in native} == native
    before, since = {"backward_dtype", "original_dtype"}, {"bwd_op_dtype", "bwd_out_dtype"}
    assert actual.keys() - native.keys() == (before if RELEASE >= (2, 13) else since)


def test_what_to_local_leaves_for_its_backward(mesh):
    context = Context()
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    _api._ToTorchTensor.forward(context, x, None)
    actual, native = vars(_compat.to_local_context(x._spec, (4, 1))), vars(context)
    assert {name: actual[name] for name in native} == native
    since = {"local_tensor_stride"}
    assert actual.keys() - native.keys() == (set() if RELEASE >= (2, 14) else since)


def test_candidates_are_made_and_refused_as_expansion_does():
    source = inspect.getsource(_compat.expand_to_full_mesh)
    assert _compat.VALIDITY_OPTION in inspect.signature(_compat.expand_to_full_mesh).parameters
    assert ("has_mixed_partial" in source) is _compat.MIXED_PARTIALS_ARE_REFUSED
    assert ("mismatching_input_output" in source) is _compat.IN_PLACE_RESULT_IS_CHECKED
    assert ("_input_use_strided" in source) is _compat.STRIDED_ORDER_IS_PASSED_ON
    assert ("has_container_output_meta" in source) is _compat.LISTS_OF_ONE_ARE_TUPLES
    assert ("if not argument.is_out" in source) is (RELEASE >= (2, 13))
    assert _compat.checked_outs(aten.neg.out) == ["out"]
    assert _compat.checked_outs(aten.neg.default) == []
    two = ["values", "indices"] if RELEASE >= (2, 13) else []
    assert sorted(_compat.checked_outs(aten.sort.values)) == sorted(two)


def test_costs_are_made_of_these():
    planner = _redistribute.DTensorRedistributePlanner
    shards_become_sums = hasattr(planner, "_get_shard_to_partial_target_states")
    assert shards_become_sums is _compat.SHARDS_BECOME_SUMS
    counted = inspect.getsource(DTensorSpec.num_shards.fget)
    assert ("_is_shard_like" in counted) is _compat.STRIDED_SHARDS_COUNT


def test_the_topology_of_a_mesh_is_made_by_torch_and_kept_by_nobody():
    cached = _collective_utils.MeshTopoInfo.build_from_mesh
    with fake_mesh((2, 4)) as mesh:
        before = cached.cache_info()
        made = _compat.mesh_topology(mesh)
        assert cached.cache_info() == before
        assert made.mesh_dim_devices == [2, 4]
        assert made == cached(mesh)
    cached.cache_clear()


def test_the_search_is_forced_by_this_flag():
    assert not _compat.redistributes_by_graph()
    with _redistribute.use_min_cost_redistribution_plan():
        assert _compat.redistributes_by_graph()


def test_torch_infers_results_by_these_names():
    assert "FakeTensorMode()" in inspect.getsource(_sharding_prop.ShardingPropagator)
    made = inspect.getsource(_op_schema.OpSchema.gen_fake_args)
    assert _op_schema._rebuild_tensor_from_dtensor_meta.__name__ in made
