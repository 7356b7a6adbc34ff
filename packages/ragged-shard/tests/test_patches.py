"""Installing and uninstalling: when it happens, what it changes in torch, what it refuses."""

import copy
import inspect
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import ragged_shard
from ragged_shard import RaggedShard
from testkit import assert_bitwise, fake_mesh

KINDS = {
    "ragged": "ragged_shard.RaggedShard((0,), (3, 5))",
    "strided": "ragged_shard.StridedRaggedShard((0,), (3, 5), 1)",
    "interleaved": "ragged_shard.InterleavedShard(0, 2)",
}


def run(code):
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.fixture
def uninstalled():
    ragged_shard.uninstall()
    yield
    ragged_shard.install()


@pytest.mark.parametrize("order", ["import ragged_shard, torch", "import torch, ragged_shard"])
def test_importing_installs_nothing_whichever_comes_first(order):
    run(
        f"""
{order}
ragged_shard.RaggedShard, ragged_shard.visualize
assert not ragged_shard.is_installed()
from torch.distributed.tensor import DTensor
assert DTensor.__create_chunk_list__.__module__ == "torch.distributed.tensor._api"
"""
    )


SNAPSHOT = """
import sys, types  # type(), for isinstance() makes deprecated objects warn
import torch, torch.distributed.checkpoint, torch.distributed.tensor._random
import torch.distributed._state_dict_utils, torch.distributed.tensor._sharding_prop
from torch.distributed.tensor import DTensor

MODULES = [m for n, m in sys.modules.items() if n.startswith(("torch.distributed", "torch.serial"))]

def described(value):
    if type(value) is types.FunctionType:
        return (value, value.__code__, value.__defaults__, str(value.__kwdefaults__),
                sorted(value.__dict__))
    return value

def snapshot():
    found = {}
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if type(value) is types.ModuleType:
                continue
            found[module.__name__, name] = described(value)
            if issubclass(type(value), type) and value.__module__.startswith("torch.distributed"):
                for each, member in list(vars(value).items()):
                    found[value.__qualname__, each] = described(member)
    dispatcher = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    for owner in (dispatcher, propagator):
        for name, value in vars(owner).items():
            if isinstance(value, dict):
                found |= {(name, str(key)): entry for key, entry in value.items()}
            found[type(owner).__name__, "own", name] = value
    found["safe globals"] = set(torch.serialization.get_safe_globals())
    return found

def differing(one, other):
    return {
        key for key in one.keys() | other.keys()
        if one.get(key) is not other.get(key)
        and not (isinstance(one.get(key), (tuple, set)) and one.get(key) == other.get(key))
    }
"""


def test_import_changes_nothing_install_its_list_and_uninstall_takes_all_back():
    run(
        SNAPSHOT
        + """
before = snapshot()
import ragged_shard, ragged_shard.patches
ragged_shard.RaggedShard, ragged_shard.visualize
assert not differing(before, snapshot()), differing(before, snapshot())
ragged_shard.RaggedShard((0,), (3, 5))
changed = differing(before, snapshot())
for name in ("distribute_tensor", "redistribute_local_tensor", "_distribute_tensors",
             "__create_chunk_list__", "unwrap_to_op_info", "propagate_op_sharding",
             "aten.argmax.default", "_distribute_region"):
    assert any(key[-1] == name for key in changed), (name, changed)
assert "safe globals" in changed
ragged_shard.uninstall()
assert not differing(before, snapshot()), differing(before, snapshot())
"""
    )


@pytest.mark.parametrize("kind", KINDS)
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
            assert_bitwise((y + y).to_local(), torch.full((8, 4), 2.0), "stock")


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
    with pytest.raises(TypeError, match="is this torch supported"):
        RaggedShard((0,), (3, 5))
    assert distribute_tensor.__code__ is before
    assert not ragged_shard.is_installed()


def test_every_patch_point_takes_the_calls_that_torch_takes(uninstalled):
    from torch.distributed.tensor import _api, _random, _redistribute, _sharding_prop

    points = [
        (_api._FromTorchTensor, "forward"),
        (_api._ToTorchTensor, "backward"),
        (_redistribute.Redistribute, "backward"),
        (_random.OffsetBasedRNGTracker, "_distribute_region"),
        (_sharding_prop.ShardingPropagator, "propagate_op_sharding_non_cached"),
        (type(DTensor._op_dispatcher), "unwrap_to_op_info"),
        (DTensor, "__create_write_items__"),
        (DTensor, "__create_chunk_list__"),
        (DTensor, "__get_tensor_shard__"),
    ]
    before = [inspect.signature(getattr(owner, name)) for owner, name in points]
    ragged_shard.install()
    assert [inspect.signature(getattr(owner, name)) for owner, name in points] == before


def test_write_items_are_created_by_keyword_too():
    with fake_mesh((2,)) as mesh:
        placements = [RaggedShard((0,), (3, 5))]
        for at in (placements, [Replicate()]):
            x = distribute_tensor(torch.ones(8, 4), mesh, at, src_data_rank=None)
            [item] = x.__create_write_items__(fqn="w", object=x)
            assert item.tensor_data.size == (8, 4)
