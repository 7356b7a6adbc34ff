"""Installing and uninstalling: when it happens, what it changes in torch, what it refuses."""

import copy
import inspect
import io
import pickle
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    _api,
    _random,
    _redistribute,
    _utils,
    distribute_tensor,
)

import ragged_shard
from ragged_shard import RaggedShard
from testkit import assert_bitwise, fake_mesh, run_python
from testkit.inspection.call_forms import call_forms
from testkit.inspection.imports import PACKAGES, loaded_by
from testkit.inspection.torch_snapshot import changes_by, importing

KINDS = {
    "ragged": "ragged_shard.RaggedShard((0,), (3, 5))",
    "strided": "ragged_shard.StridedRaggedShard((0,), (3, 5), 1)",
    "interleaved": "ragged_shard.InterleavedShard(0, 2)",
}


WARNINGS_ARE_ERRORS = "import warnings; warnings.simplefilter('error')"
INSTALLED_NOTHING = """
ragged_shard.RaggedShard, ragged_shard.visualize
assert not ragged_shard.is_installed()
from torch.distributed.tensor import DTensor
assert DTensor.__create_chunk_list__.__module__ == "torch.distributed.tensor._api"
"""


def run(code):
    done = run_python("-c", f"{WARNINGS_ARE_ERRORS}\n{code}")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def uninstalled():
    ragged_shard.uninstall()
    yield
    ragged_shard.install()


def test_importing_it_after_torch_installs_nothing():
    run(f"import torch, ragged_shard{INSTALLED_NOTHING}")


def test_importing_it_first_installs_nothing_and_brings_torch_and_no_other_of_our_packages():
    code = f"{WARNINGS_ARE_ERRORS}; import ragged_shard{INSTALLED_NOTHING}"
    assert loaded_by(code) & (PACKAGES | {"torch"}) == {"ragged_shard", "torch"}


def test_import_changes_nothing_a_placement_its_list_and_uninstall_takes_all_back():
    imported, installed, removed = changes_by(
        importing("ragged_shard"),
        "ragged_shard.RaggedShard((0,), (3, 5))",
        "ragged_shard.uninstall()",
    )
    assert imported == removed == []
    paths = {path.rpartition(".")[2] for path in installed}
    assert paths >= {
        "distribute_tensor",
        "redistribute_local_tensor",
        "_distribute_tensors",
        "__create_chunk_list__",
        "unwrap_to_op_info",
        "_distribute_region",
    }
    dispatcher = "DTensor._op_dispatcher"
    assert f"{dispatcher}._custom_op_handlers[aten.argmax.default]" in installed
    assert f"{dispatcher}.sharding_propagator[propagate_op_sharding]" in installed
    assert len([path for path in installed if path.startswith("torch.serialization")]) == 3


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * bool(number))
        for number, kind in enumerate(KINDS)
    ],
)
def test_the_first_placement_installs(kind, uninstalled):
    placement = eval(KINDS[kind], {"ragged_shard": ragged_shard})
    assert ragged_shard.is_installed()
    for again in (
        lambda: copy.copy(placement),
        lambda: copy.deepcopy(placement),
        lambda: pickle.loads(pickle.dumps(placement)),
    ):
        ragged_shard.uninstall()
        assert again() == placement
        assert ragged_shard.is_installed()


def test_a_weights_only_load_takes_placements_while_installed(uninstalled):
    file = io.BytesIO()
    torch.save(RaggedShard((0,), (3, 5)), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == RaggedShard((0,), (3, 5))
    ragged_shard.uninstall()
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="RaggedShard"):
        torch.load(file, weights_only=True)


def test_safe_globals_of_the_users_own_stay(uninstalled):
    with torch.serialization.safe_globals([RaggedShard]):
        ragged_shard.install()
        ragged_shard.uninstall()
        assert RaggedShard in torch.serialization.get_safe_globals()


def test_functions_that_were_imported_before_are_replaced_and_restored():
    run(
        """
from torch.distributed.tensor import distribute_tensor
import inspect, torch, ragged_shard
from testkit import fake_mesh
before = distribute_tensor.__code__, inspect.signature(distribute_tensor)
placements = [ragged_shard.RaggedShard((0,), (3, 5))]
assert distribute_tensor.__code__ is not before[0]
assert inspect.signature(distribute_tensor) == before[1]
with fake_mesh((2,)) as mesh:
    placed = distribute_tensor(torch.ones(8, 4), mesh, placements, src_data_rank=None)
assert placed.to_local().shape == (3, 4)
del placed
ragged_shard.uninstall()
assert (distribute_tensor.__code__, inspect.signature(distribute_tensor)) == before
"""
    )


def test_installing_twice_changes_nothing(uninstalled):
    ragged_shard.install()
    before = DTensor.__create_chunk_list__, distribute_tensor.__code__
    ragged_shard.install()
    assert before == (DTensor.__create_chunk_list__, distribute_tensor.__code__)


def test_decisions_do_not_outlive_an_installation(uninstalled):
    for _ in range(2):
        with fake_mesh((2,)) as mesh:
            placements = [RaggedShard((0,), (3, 5))]
            x = distribute_tensor(torch.ones(8, 4), mesh, placements, src_data_rank=None)
            assert_bitwise((x + x).to_local(), torch.full((3, 4), 2.0), "sum")
            assert x.redistribute(placements=[Replicate()]).to_local().shape == (8, 4)
        del x
        ragged_shard.uninstall()
        with fake_mesh((2,)) as mesh:
            y = distribute_tensor(torch.ones(8, 4), mesh, [Replicate()], src_data_rank=None)
            assert_bitwise((y + y).to_local(), torch.full((8, 4), 2.0), "native")


def test_tensors_that_still_exist_are_not_stranded(uninstalled):
    with fake_mesh((2,)) as mesh:
        placements = [RaggedShard((0,), (3, 5))]
        x = distribute_tensor(torch.ones(8, 4), mesh, placements, src_data_rank=None)
        holder = [torch.nn.Parameter(x)]
        holder.append(holder)  # found and freed by the collector alone
        del x
        with pytest.raises(RuntimeError, match=r"got [1-9]\d*, the first of shape \(8, 4\)"):
            ragged_shard.uninstall()
        assert ragged_shard.is_installed()
        assert holder[0].redistribute(placements=[Replicate()]).to_local().shape == (8, 4)
    del holder
    ragged_shard.uninstall()
    assert not ragged_shard.is_installed()


def test_a_failed_installation_leaves_nothing_behind(uninstalled, monkeypatch):
    import torch.distributed._state_dict_utils as state_dict_utils

    before = distribute_tensor.__code__
    monkeypatch.setattr(state_dict_utils, "_distribute_tensors", len)
    with pytest.raises(TypeError, match="use a supported version of torch"):
        RaggedShard((0,), (3, 5))
    assert distribute_tensor.__code__ is before
    assert not ragged_shard.is_installed()


def calls(mesh, placements):
    """Each replaced function of torch, and arguments for it; nothing is sent."""
    whole = torch.arange(32.0).reshape(8, 4)
    x = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    spec, local, dispatcher = x._spec, x._local_tensor, DTensor._op_dispatcher
    schema = dispatcher.unwrap_to_op_info(torch.ops.aten.neg.default, (x,), {}).schema
    to_local = SimpleNamespace(
        dtensor_spec=spec, grad_placements=None, local_tensor_stride=local.stride()
    )
    redistributed = SimpleNamespace(
        current_spec=spec, async_op=False, bwd_op_dtype=x.dtype, bwd_out_dtype=x.dtype,
        backward_dtype=None, original_dtype=x.dtype,
    )  # fmt: skip
    forwarded = SimpleNamespace(set_materialize_grads=lambda _: None)
    shape, tracker = x.shape, object.__new__(_random.OffsetBasedRNGTracker)
    [chunk] = x.__create_chunk_list__()
    at = MetadataIndex("w", chunk.offsets)
    region = _utils._compute_local_shape_and_global_offset
    forward = _api._FromTorchTensor.forward
    return [
        (tracker._distribute_region, (spec,), {}),
        (distribute_tensor, (whole, mesh, placements), {"src_data_rank": None}),
        (_redistribute.redistribute_local_tensor, (local, spec, spec), {}),
        (region, (shape, mesh.shape, mesh.get_coordinate(), placements), {}),
        (_state_dict_utils._distribute_tensors, ({}, [], torch.device("cpu")), {}),
        (forward, (forwarded, local, mesh, placements, False, shape, x.stride()), {}),
        (_api._ToTorchTensor.backward, (to_local, local), {}),
        (_redistribute.Redistribute.backward, (redistributed, x), {}),
        (x.__create_write_items__, ("w", x), {}),
        (x.__create_chunk_list__, (), {}),
        (x.__get_tensor_shard__, (at,), {}),
        (dispatcher.sharding_propagator.propagate_op_sharding_non_cached, (schema,), {}),
        (dispatcher.unwrap_to_op_info, (torch.ops.aten.neg.default, (x,), {}), {}),
    ]


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), RaggedShard((0,), (3, 5))], ids=str)
def test_every_patch_point_takes_the_calls_that_torch_takes(placement):
    """By position, by keyword and with defaults; what it returns is as torch prints it."""
    with fake_mesh((2,)) as mesh:
        forms = [
            call_forms(function, *args, **kwargs)
            for function, args, kwargs in calls(mesh, (placement,))
        ]
        found = [
            [str(form.call(function)) for form in each]
            for (function, *_), each in zip(calls(mesh, (placement,)), forms, strict=True)
        ]
        if type(placement) is RaggedShard:
            return
        ragged_shard.uninstall()
        try:
            expected = [
                [str(form.call(function)) for form in each]
                for (function, *_), each in zip(calls(mesh, (placement,)), forms, strict=True)
            ]
        finally:
            ragged_shard.install()
    without_addresses = partial(re.sub, r" at 0x\w+", "")
    assert [[*map(without_addresses, each)] for each in found] == [
        [*map(without_addresses, each)] for each in expected
    ]


def test_every_patch_point_has_the_signature_of_torchs(uninstalled):
    with fake_mesh((2,)) as mesh:
        before = [inspect.signature(each) for each, *_ in calls(mesh, (Replicate(),))]
        ragged_shard.install()
        assert [inspect.signature(each) for each, *_ in calls(mesh, (Replicate(),))] == before


def test_write_items_are_created_by_keyword_too():
    with fake_mesh((2,)) as mesh:
        placements = [RaggedShard((0,), (3, 5))]
        for at in (placements, [Replicate()]):
            x = distribute_tensor(torch.ones(8, 4), mesh, at, src_data_rank=None)
            [item] = x.__create_write_items__(fqn="w", object=x)
            assert item.tensor_data.size == (8, 4)
