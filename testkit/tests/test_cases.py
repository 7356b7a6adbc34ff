import re

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from testkit import Case, CommLog, assert_bitwise, cases, each_rank, fake_mesh, run_ranks
from testkit.cases import _contribution


def test_the_table_is_of_use():
    table = cases()
    assert 60 <= len(table) <= 120
    assert len(cases(world_size=2)) >= 20
    assert len(cases(world_size=4)) >= 30
    assert len({str(case) for case in table}) == len(table)
    assert {len(case.mesh_shape) for case in table} == {1, 2, 3}
    assert any(case.shape == () for case in table)
    assert any(0 in case.shape for case in table)


def test_ids_can_be_read_aloud():
    case = Case((2, 2), (Shard(0), Replicate()), (5, 7), torch.float32)
    assert str(case) == "mesh2x2-S0.R-shape5x7-f32"
    assert "mesh2-Psum-scalar-f32" in map(str, cases())
    assert all(
        re.fullmatch(r"mesh[\dx]+-[A-Za-z\d.]+-(scalar|shape[\dx]+)-[a-z]+\d*", str(case))
        for case in cases()
    )


def test_selection():
    assert all(case.world_size == 4 for case in cases(world_size=4))
    assert all(len(case.mesh_shape) == 3 for case in cases(mesh_ndim=3))
    assert not any("P" in str(case) for case in cases(partial=False))
    assert any("P" in str(case) for case in cases())
    assert {case.dtype for case in cases(dtypes=[torch.bfloat16])} == {torch.bfloat16}


def test_an_empty_selection_is_an_error():
    with pytest.raises(ValueError, match=r"got world_size=7,(?s:.*)world sizes \[1, 2, 3, 4, 8\]"):
        cases(world_size=7)


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one placement per axis"):
        Case((2, 2), (Shard(0),), (4,))
    for dim in (1, -1):
        with pytest.raises(ValueError, match="expected a dim of a tensor"):
            Case((2,), (Shard(dim),), (4,))


@pytest.mark.parametrize("case", cases(), ids=str)
def test_tensors_are_the_same_each_time_and_exact_in_their_dtype(case):
    state = torch.random.get_rng_state()
    tensor = case.tensor()
    assert torch.equal(state, torch.random.get_rng_state())
    assert (tuple(tensor.shape), tensor.dtype) == (case.shape, case.dtype)
    assert_bitwise(tensor, case.tensor(0))
    if tensor.numel() > 4:
        assert not torch.equal(tensor, case.tensor(1))
    if case.dtype is not torch.bool:
        assert tensor.numel() == 0 or -8 <= tensor.min() <= tensor.max() <= 8


@pytest.mark.parametrize("case", cases(partial=False), ids=str)
def test_shards_are_those_of_distribute_tensor(case):
    whole = case.tensor()
    for _, mesh in each_rank(case.mesh_shape):
        with CommLog() as log:
            mine = case.distribute(mesh, whole)
        log.assert_counts({})
        expected = distribute_tensor(whole, mesh, case.placements, src_data_rank=None)
        assert_bitwise(mine.to_local(), expected.to_local())
        assert mine.placements == expected.placements
        assert (mine.shape, mine.stride()) == (whole.shape, whole.stride())


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_contributions_reduce_to_the_tensor_and_every_one_counts(reduce_op, count):
    tensor = Case((2,), (Replicate(),), (5, 7)).tensor()
    parts = [_contribution(tensor, reduce_op, index, count) for index in range(count)]
    reduce = {
        "sum": lambda parts: torch.stack(parts).sum(0),
        "avg": lambda parts: torch.stack(parts).sum(0) / count,
        "max": lambda parts: torch.stack(parts).amax(0),
        "min": lambda parts: torch.stack(parts).amin(0),
    }[reduce_op]
    assert_bitwise(reduce(parts), tensor)
    for left_out in range(count if count > 1 else 0):
        changed = [torch.zeros_like(p) if i == left_out else p for i, p in enumerate(parts)]
        assert not torch.equal(reduce(changed), tensor)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="product"):
        _contribution(torch.ones(1), "product", 0, 2)


def test_a_mesh_or_tensor_of_another_shape_is_refused():
    case = Case((2,), (Shard(0),), (4,))
    with (
        fake_mesh((2,)) as mesh,
        pytest.raises(ValueError, match=r"shape \(2,\) and .* shape \(4,\), got"),
    ):
        case.distribute(mesh, torch.ones(5))
    with fake_mesh((4,)) as mesh, pytest.raises(ValueError, match=r"got \(4,\) and"):
        case.distribute(mesh)


def check_all(table):
    from torch.distributed.device_mesh import init_device_mesh

    meshes = {shape: init_device_mesh("cpu", shape) for shape in {c.mesh_shape for c in table}}
    for case in table:
        distributed = case.distribute(meshes[case.mesh_shape])
        assert isinstance(distributed, DTensor)
        assert_bitwise(distributed, case.tensor(), str(case))
    return len(table)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [4, 3, 2, 1])  # all processes start at once
def test_every_case_gathers_and_reduces_to_its_tensor(world_size):
    table = cases(world_size=world_size)
    assert run_ranks(check_all, world_size, table) == [len(table)] * world_size
