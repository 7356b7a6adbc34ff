"""Canaries: what torch does, silently, to a placement it does not know, for each patch point.

`Unknown` is a placement that no patch point recognises, so torch's own code runs. When one of these
tests fails, torch has changed: read its code, and decide whether the patch point is still needed
and still sufficient.
"""

import inspect

import pytest
import torch
from torch.distributed._state_dict_utils import _distribute_tensors
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._random import OffsetBasedRNGTracker
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from ragged_shard import InterleavedShard, RaggedShard
from ragged_shard.patch_points import Patches
from testkit import fake_mesh

SHAPE, STRIDE = torch.Size((8, 4)), (4, 1)


class Unknown(Placement):
    """As RaggedShard, but unknown to torch and to the patch points."""

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
    ragged = RaggedShard((0,), (3, 5))
    result = redistribute_local_tensor(whole, spec(mesh, Replicate()), spec(mesh, ragged))
    assert result.shape == (3, 4)


def test_stock_says_an_unknown_shard_is_the_whole_tensor(mesh):
    shape, offset = compute_local_shape_and_global_offset(SHAPE, mesh, [Unknown()])
    assert (tuple(shape), tuple(offset)) == ((8, 4), (0, 0))
    shape, offset = compute_local_shape_and_global_offset(SHAPE, mesh, [RaggedShard((0,), (3, 5))])
    assert (tuple(shape), tuple(offset)) == ((3, 4), (0, 0))


def test_stock_saves_an_unknown_shard_as_the_whole_tensor(mesh):
    [item] = _create_write_items("w", unknown(mesh))
    assert item.tensor_data.chunk.sizes == SHAPE
    ragged = distribute_tensor(
        torch.ones(SHAPE), mesh, [RaggedShard((0,), (3, 5))], src_data_rank=None
    )
    [item] = _create_write_items("w", ragged)
    assert item.tensor_data.chunk.sizes == (3, 4)


def test_stock_loads_the_whole_tensor_into_an_unknown_shard(mesh):
    assert unknown(mesh).__create_chunk_list__()[0].sizes == SHAPE
    ragged = distribute_tensor(
        torch.ones(SHAPE), mesh, [RaggedShard((0,), (3, 5))], src_data_rank=None
    )
    assert [tuple(chunk.sizes) for chunk in ragged.__create_chunk_list__()] == [(3, 4)]


def test_stock_copies_a_broadcast_tensor_over_an_unknown_shard_as_if_whole(mesh):
    state = {"w": (unknown(mesh, rows=8), torch.full(SHAPE, 7.0))}
    _distribute_tensors(state, ["w"], torch.device("cpu"))
    assert state["w"].to_local().shape == SHAPE
    ragged = distribute_tensor(
        torch.ones(SHAPE), mesh, [RaggedShard((0,), (3, 5))], src_data_rank=None
    )
    state = {"w": (ragged, torch.full(SHAPE, 7.0))}
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
    with pytest.raises(
        ValueError, match=r"expected a local tensor of shape \(3, 4\) .* got \(2, 4\)"
    ):
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
    ragged = spec(mesh, RaggedShard((0,), (3, 5)))  # as two ranks have them
    three, five = (DTensor(torch.ones(n, 4), ragged, requires_grad=False) for n in (3, 5))
    assert three._stable_hash_for_caching() != five._stable_hash_for_caching()


@pytest.mark.skipif(
    not hasattr(OffsetBasedRNGTracker, "_compute_rng_offsets"),
    reason="this torch computes no offsets apart from a device's generator, which a CPU lacks",
)
def test_stock_draws_the_same_random_numbers_on_every_rank_for_an_unknown_shard():
    tracker = object.__new__(OffsetBasedRNGTracker)  # its constructor needs an accelerator
    with fake_mesh((2,), rank=1) as mesh:
        for placement, offset in (
            (Unknown(), 0), (Shard(0), 16), (RaggedShard((0,), (3, 5)), 16),
            (InterleavedShard(1, 2), 16), (Replicate(), 0),
        ):  # fmt: skip
            assert tracker._compute_rng_offsets(spec(mesh, placement)) == (offset, 32)


@pytest.fixture
def patches():
    patches = Patches()
    yield patches
    patches.restore()


def plain(a, b=2, *, c=3):
    """Adds."""
    return a + b + c


def test_a_replaced_function_keeps_its_callers_its_name_and_its_signature(patches):
    alias, signature = plain, inspect.signature(plain)
    patches.function(plain, lambda native, *args, **kwargs: 10 * native(*args, **kwargs))
    assert alias(1) == 60
    assert alias(1, 1, c=1) == 30
    assert (alias.__name__, alias.__doc__, inspect.signature(alias)) == (
        "plain",
        "Adds.",
        signature,
    )
    with pytest.raises(TypeError, match="got a patch"):
        patches.function(plain, lambda native: native())


def everything_of(function):
    return (
        *(function.__code__, function.__defaults__, function.__kwdefaults__),
        *(dict(function.__dict__), set(function.__globals__)),
    )


def test_a_restored_function_is_what_it_was():
    plain.marked = "by its owner"
    before, patches = everything_of(plain), Patches()
    patches.function(plain, lambda native, *args, **kwargs: 0)
    assert plain(1) == 0
    patches.restore()
    assert plain(1) == 6
    assert everything_of(plain) == before


def test_a_closure_is_refused(patches):
    captured = 1
    with pytest.raises(TypeError, match="expected a plain Python function"):
        patches.function(lambda: captured, lambda native: native())


class Base:
    def inherited(self):
        return 1


class Owner(Base):
    def method(self, x):
        return x

    @staticmethod
    def static(x):
        return x


def test_methods_and_static_methods_are_replaced_and_restored():
    before, patches = dict(vars(Owner)), Patches()
    patches.method(Owner, "method", lambda native, self, x: native(self, x) + 1)
    patches.method(Owner, "static", lambda native, x: native(x) + 2)
    patches.method(Owner, "inherited", lambda native, self: native(self) + 3)
    assert Owner().method(1) == 2
    assert Owner.static(1) == Owner().static(1) == 3
    assert (Owner().inherited(), Base().inherited()) == (4, 1)
    assert list(inspect.signature(Owner.method).parameters) == ["self", "x"]
    patches.restore()
    assert dict(vars(Owner)) == before


def test_what_others_replaced_since_is_not_restored_and_nothing_else_is():
    patches, table = Patches(), {"op": 1}
    patches.method(Owner, "method", lambda native, self, x: native(self, x) + 1)
    patches.item(table, "op", 2)
    table["op"] = 3
    with pytest.raises(RuntimeError, match=r"expected the entry of op as .* undo that first"):
        patches.restore()
    assert (Owner().method(1), table) == (2, {"op": 3})
    table["op"] = 2
    patches.restore()
    assert (Owner().method(1), table) == (1, {"op": 1})
