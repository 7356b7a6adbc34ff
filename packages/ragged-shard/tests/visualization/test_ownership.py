"""Ownership as data: who holds what, for DTensors and for shapes alone."""

import dataclasses
import math
import re

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from ragged_shard.geometry.boxes import TensorBox
from ragged_shard.visualization.ownership import ownership
from ragged_shard.visualization.parts import RankPart
from testkit import CommLog, fake_mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)
CASES = [
    ((8, 6), (4,), (RaggedShard((0,), (1, 3, 0, 4)),)),
    ((8, 6), (4,), (RaggedShard.owned_by(2, 4),)),
    ((6, 8), (2, 2), (StridedRaggedShard((0, 1), (5, 7), 2), S0)),
    ((6, 8), (2, 2), (RaggedShard((0,), (1, 2)), S1)),
    ((6, 8), (2, 2), (R, RaggedShard((0, 1), (47, 1)))),
    ((12, 4), (2, 2), (R, InterleavedShard(0, 3))),
    ((2, 12), (2, 2), (RaggedShard((0,), (0, 2)), InterleavedShard(1, 3))),
    ((7, 3), (4,), (S0,)),
    ((9, 3), (2, 2), (S0, S0)),
    ((8, 3), (2, 2), (_StridedShard(0, split_factor=2), S0)),
    ((4, 4), (2, 2), (Partial(), S1)),
    ((2, 3, 4), (2, 2), (R, R)),
    ((), (2,), (R,)),
    ((0, 3), (2,), (S0,)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'.'.join(map(str, case[2]))}")
def test_every_rank_holds_its_local_tensor(case):
    """The elements that the data names are those that a local tensor cut on that rank has."""
    shape, mesh_shape, placements = case
    found = ownership(shape, mesh_shape=mesh_shape, placements=placements)
    ranks = found.ranks
    numbers = torch.arange(float(math.prod(shape))).reshape(shape)
    for rank in range(math.prod(mesh_shape)):
        with fake_mesh(mesh_shape, rank=rank) as mesh:
            # Partial is cut by nothing, and its terms have other values.
            cut = [R if placement.is_partial() else placement for placement in placements]
            local = distribute_tensor(numbers, mesh, cut, src_data_rank=None).to_local()
        mine = numbers[(ranks == rank).any(-1)]
        assert sorted(local.flatten().tolist()) == sorted(mine.flatten().tolist()), rank
        assert found.part(rank).numel == local.numel()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'.'.join(map(str, case[2]))}")
def test_a_dtensor_tells_it_all_without_communication(case):
    shape, mesh_shape, placements = case
    with fake_mesh(mesh_shape, rank=1) as mesh:
        cut = [R if placement.is_partial() else placement for placement in placements]
        tensor = distribute_tensor(torch.zeros(shape), mesh, cut, src_data_rank=None)
        with CommLog() as log:
            found = ownership(tensor)
    assert not log.calls
    assert found == ownership(shape, mesh_shape=mesh_shape, placements=cut)


def test_ranks_are_those_of_the_mesh_and_axes_have_its_names():
    with fake_mesh((8,)):
        mesh = DeviceMesh("cpu", [[0, 6], [5, 3]], mesh_dim_names=("fsdp", "tp"))
        tensor = DTensor.from_local(torch.zeros(1, 4), mesh, [S0, R])
        found = ownership(tensor)
    assert found.axis_names == ("fsdp", "tp")
    assert [part.ranks for part in found.parts] == [(0, 6), (3, 5)]
    assert found.ranks.tolist() == [[[0, 6]] * 4, [[3, 5]] * 4]


def test_a_rank_beside_the_mesh_may_ask():
    with fake_mesh((4,), rank=3):
        mesh = init_device_mesh("cpu", (4,))
        tensor = DTensor.from_local(torch.zeros(1, 4), mesh, [S0])
        assert ownership(tensor).part(0).boxes == (TensorBox((0, 0), (1, 4)),)


def test_parts_are_by_rank_and_those_that_hold_the_same_are_one():
    found = ownership((4, 6), mesh_shape=(3, 2), placements=[RaggedShard((0,), (1, 0, 3)), R])
    assert found.parts == (
        RankPart((0, 1), (TensorBox((0, 0), (1, 6)),)),
        RankPart((2, 3), ()),
        RankPart((4, 5), (TensorBox((1, 0), (3, 6)),)),
    )
    assert [part.numel for part in found.parts] == [6, 0, 18]


def test_ranks_is_an_array_of_the_tensors_shape_and_holders():
    found = ownership((2, 3), mesh_shape=(2, 2), placements=[R, S1])
    assert found.ranks.shape == (2, 3, 2)
    assert found.ranks.dtype == torch.int64
    assert found.ranks[0].tolist() == [[0, 2], [0, 2], [1, 3]]
    assert ownership((), mesh_shape=(2,), placements=[R]).ranks.tolist() == [0, 1]


def test_negative_dims_count_from_the_end():
    found = ownership((4, 6), mesh_shape=(2,), placements=[Shard(-1)])
    assert found.placements == (S1,)
    assert found.part(1).boxes == (TensorBox((0, 3), (4, 3)),)


def test_it_cannot_be_changed():
    found = ownership((4,), mesh_shape=(2,), placements=[S0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.shape = (5,)


def test_a_rank_that_is_not_in_the_mesh_is_refused():
    found = ownership((4,), mesh_shape=(2,), placements=[S0])
    with pytest.raises(
        ValueError, match=re.escape("expected a rank of the mesh, one of [0, 1], got 2")
    ):
        found.part(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "with the shape (4, 6), got None and None"),
        ({"mesh_shape": (2,)}, "expected both mesh_shape= and placements="),
        ({"placements": [S0]}, "expected both mesh_shape= and placements="),
    ],
)
def test_a_shape_alone_is_refused(arguments, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        ownership((4, 6), **arguments)


def test_a_tensor_of_one_device_is_refused():
    with pytest.raises(TypeError, match=re.escape("got a Tensor of shape (4, 6) on one device")):
        ownership(torch.zeros(4, 6), mesh_shape=(2,), placements=[S0])


def test_a_dtensor_has_its_own_mesh():
    with fake_mesh((2,)) as mesh:
        tensor = DTensor.from_local(torch.zeros(1, 4), mesh, [S0])
        with pytest.raises(TypeError, match="expected a DTensor without mesh_shape and placements"):
            ownership(tensor, mesh_shape=(2,))


@pytest.mark.parametrize("mesh_shape", [(), (2, 0), (-1,)])
def test_a_mesh_without_ranks_is_refused(mesh_shape):
    message = f"mesh_shape= of one size of at least 1 per axis, got {mesh_shape}"
    with pytest.raises(ValueError, match=re.escape(message)):
        ownership((4,), mesh_shape=mesh_shape, placements=[S0])


def test_placements_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"divides 4, the elements .*, got 3;"):
        ownership((4,), mesh_shape=(2,), placements=[RaggedShard((0,), (1, 2))])
    with pytest.raises(
        ValueError, match=r"expected one for each of the 1 axes of mesh \(2,\), got 2"
    ):
        ownership((4,), mesh_shape=(2,), placements=[S0, R])


def test_it_draws_itself(tmp_path):
    found = ownership((4, 2), mesh_shape=(2,), placements=[S0])
    found.save_svg(tmp_path / "found.svg")
    assert (tmp_path / "found.svg").read_text(encoding="utf-8") == found.svg()
    assert found._repr_svg_() == found.svg()
    assert found.text().splitlines()[0] == "tensor (4, 2) on mesh (2,)"
