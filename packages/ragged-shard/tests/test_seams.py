"""Canaries: what stock torch does, silently, to a placement it does not know, seam by seam.

`Unknown` stands for ours before the package is there: the seams let it pass, so it meets torch's
own code. When one of these tests fails, torch has changed: read its code, and see whether the seam
is still needed and still enough.
"""

import subprocess
import sys

import pytest
import torch
from torch.distributed._state_dict_utils import _distribute_tensors
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from ragged_shard import RaggedShard
from ragged_shard.install import install
from ragged_shard.seams import replace_function, replace_method
from testkit import fake_mesh

SHAPE, STRIDE = torch.Size((8, 4)), (4, 1)


class Unknown(Placement):
    """As RaggedShard, but nobody told torch, nor the seams."""

    def __init__(self):
        super().__init__()

    def __eq__(self, other):
        return isinstance(other, Unknown)

    def __hash__(self):
        return 1

    def __repr__(self):
        return "Unknown()"


@pytest.fixture
def mesh():
    with fake_mesh((2,)) as mesh:
        yield mesh


def spec(mesh, placement):
    meta = TensorMeta(SHAPE, STRIDE, torch.float32)
    return DTensorSpec(mesh, (placement,), tensor_meta=meta)


def unknown(mesh, rows=3):
    return DTensor(torch.ones(rows, 4), spec(mesh, Unknown()), requires_grad=False)


def ragged(mesh):
    placements = [RaggedShard((0,), (3, 5))]
    return distribute_tensor(torch.ones(SHAPE), mesh, placements, src_data_rank=None)


def test_stock_redistributes_to_an_unknown_placement_by_doing_nothing(mesh):
    whole = torch.ones(SHAPE)
    for source in (Replicate(), Shard(0)):
        try:
            result = redistribute_local_tensor(whole, spec(mesh, source), spec(mesh, Unknown()))
        except (RuntimeError, ValueError, AssertionError):
            continue  # louder than it was
        assert result is whole
    ours = RaggedShard((0,), (3, 5))
    result = redistribute_local_tensor(whole, spec(mesh, Replicate()), spec(mesh, ours))
    assert result.shape == (3, 4)


def test_stock_says_an_unknown_shard_is_the_whole_tensor(mesh):
    shape, offset = compute_local_shape_and_global_offset(SHAPE, mesh, [Unknown()])
    assert (tuple(shape), tuple(offset)) == ((8, 4), (0, 0))
    with pytest.raises(ValueError, match="no single box"):
        compute_local_shape_and_global_offset(SHAPE, mesh, [RaggedShard((0,), (3, 5))])


def test_stock_saves_an_unknown_shard_as_the_whole_tensor(mesh):
    [item] = _create_write_items("w", unknown(mesh))
    assert item.tensor_data.chunk.sizes == SHAPE
    ours = distribute_tensor(
        torch.ones(SHAPE), mesh, [RaggedShard((0,), (3, 5))], src_data_rank=None
    )
    [item] = _create_write_items("w", ours)
    assert item.tensor_data.chunk.sizes == (3, 4)


def test_stock_loads_the_whole_tensor_into_an_unknown_shard(mesh):
    assert unknown(mesh).__create_chunk_list__()[0].sizes == SHAPE
    ours = distribute_tensor(
        torch.ones(SHAPE), mesh, [RaggedShard((0,), (3, 5))], src_data_rank=None
    )
    assert [tuple(chunk.sizes) for chunk in ours.__create_chunk_list__()] == [(3, 4)]


def test_stock_copies_a_broadcast_tensor_over_an_unknown_shard_as_if_whole(mesh):
    state = {"w": (unknown(mesh, rows=8), torch.full(SHAPE, 7.0))}
    _distribute_tensors(state, ["w"], torch.device("cpu"))
    assert state["w"].to_local().shape == SHAPE
    ours = distribute_tensor(
        torch.ones(SHAPE), mesh, [RaggedShard((0,), (3, 5))], src_data_rank=None
    )
    state = {"w": (ours, torch.full(SHAPE, 7.0))}
    _distribute_tensors(state, ["w"], torch.device("cpu"))
    assert state["w"].to_local().tolist() == torch.full((3, 4), 7.0).tolist()


def test_stock_transposes_an_unknown_shard_without_a_word(mesh):
    try:
        result = unknown(mesh).t()
    except Exception:
        return  # louder than it was
    assert result.placements in ((Unknown(),), (Replicate(),))


def test_stock_refuses_to_distribute_to_an_unknown_placement(mesh):
    with pytest.raises(RuntimeError, match="unsupported placements"):
        distribute_tensor(torch.ones(SHAPE), mesh, [Unknown()])


def test_stock_lets_a_local_tensor_of_any_size_be_an_unknown_shard(mesh):
    made = DTensor.from_local(torch.ones(2, 4), mesh, [Unknown()], shape=SHAPE, stride=STRIDE)
    assert made.to_local().shape == (2, 4)
    with pytest.raises(ValueError, match=r"want a local tensor of \(3, 4\), got \(2, 4\)"):
        DTensor.from_local(
            torch.ones(2, 4), mesh, [RaggedShard((0,), (3, 5))], shape=SHAPE, stride=STRIDE
        )


@pytest.mark.skipif(
    not hasattr(DTensor, "_stable_hash_for_caching"), reason="torch 2.11 has no such hash"
)
def test_stock_hashes_shards_of_other_sizes_alike(mesh):
    assert (
        unknown(mesh, 3)._stable_hash_for_caching() == unknown(mesh, 5)._stable_hash_for_caching()
    )
    ours = spec(mesh, RaggedShard((0,), (3, 5)))
    three, five = (DTensor(torch.ones(n, 4), ours, requires_grad=False) for n in (3, 5))
    assert three._stable_hash_for_caching() != five._stable_hash_for_caching()


def test_installing_twice_changes_nothing():
    before = DTensor.__create_chunk_list__, distribute_tensor.__code__
    install()
    assert before == (DTensor.__create_chunk_list__, distribute_tensor.__code__)


def test_functions_that_were_imported_before_are_replaced_too():
    code = """
from torch.distributed.tensor import distribute_tensor
import ragged_shard
import inspect, torch
from testkit import fake_mesh
from ragged_shard import RaggedShard
placements = [RaggedShard((0,), (3, 5))]
with fake_mesh((2,)) as mesh:
    placed = distribute_tensor(torch.ones(8, 4), mesh, placements, src_data_rank=None)
assert placed.to_local().shape == (3, 4)
assert list(inspect.signature(distribute_tensor).parameters) == [
    "tensor", "device_mesh", "placements", "src_data_rank"
]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("order", ["import ragged_shard, torch", "import torch, ragged_shard"])
def test_the_seams_are_there_whichever_is_imported_first(order):
    code = f"""
{order}
ragged_shard.RaggedShard
import torch.distributed.tensor._api as api
assert getattr(api.distribute_tensor, "__ragged_shard_seam__", False)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def plain(a, b=2, *, c=3):
    return a + b + c


def test_a_replaced_function_keeps_its_callers_its_name_and_its_signature():
    alias = plain
    replace_function(plain, lambda stock, *args, **kwargs: 10 * stock(*args, **kwargs))
    assert alias(1) == 60
    assert alias(1, 1, c=1) == 30
    assert alias.__name__ == "plain"
    replace_function(plain, lambda stock, *args: 0)  # a second time: no effect
    assert alias(1) == 60


def test_a_closure_is_refused():
    captured = 1
    with pytest.raises(TypeError, match="no plain function"):
        replace_function(lambda: captured, lambda stock: stock())


class Owner:
    def method(self, x):
        return x

    @staticmethod
    def static(x):
        return x


def test_methods_and_static_methods_are_replaced():
    replace_method(Owner, "method", lambda stock, self, x: stock(self, x) + 1)
    replace_method(Owner, "static", lambda stock, x: stock(x) + 2)
    replace_method(Owner, "method", lambda stock, self, x: 0)
    assert Owner().method(1) == 2
    assert Owner.static(1) == Owner().static(1) == 3
