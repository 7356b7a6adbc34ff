"""Placements of a spec: which are refused, and what shape they leave, against index tensors."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard, local_shape
from ragged_shard.geometry.specs import (
    any_custom,
    base_shape,
    dim_of,
    even_shape,
    is_custom,
    largest_shape,
    ragged_axis,
    replace_axis,
    tensor_meta_of,
    with_placements,
)
from ragged_shard.geometry.validation import check_placements
from testkit import fake_mesh

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
ROWS = RaggedShard((0,), (1, 3))
ELEMENTS = RaggedShard((0, 1), (5, 7))
OWNED = RaggedShard.owned_by(1, 2)


def local(numbers, placements, mesh_shape, coordinate):
    """A rank's local tensor of a tensor of indices, by way of torch's own operators."""
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, InterleavedShard):
            chunks = numbers.chunk(placement.interleaves, placement.dim)
            parts = [chunked(chunk, placement.dim, size, index) for chunk in chunks]
            numbers = torch.cat(parts, placement.dim)
        elif isinstance(placement, _StridedShard):
            numbers = placement._split_tensor(numbers, size, with_padding=False)[0][index]
        elif isinstance(placement, Shard):
            numbers = chunked(numbers, placement.dim, size, index)
    for placement, index in zip(placements, coordinate, strict=True):
        if isinstance(placement, RaggedShard):
            rest = numbers.shape[len(placement.dims) :]
            unit = numbers.numel() // sum(placement.local_units)
            if placement.unit_length is not None:
                unit = placement.unit_length * rest.numel()
            start = unit * sum(placement.local_units[:index])
            stop = start + unit * placement.local_units[index]
            if placement.dims:
                numbers = numbers.flatten()[start:stop].reshape(-1, *rest)
            else:
                nothing = numbers.new_empty(0, *numbers.shape[1:])
                numbers = numbers if placement.owner == index else nothing
    return numbers


def chunked(tensor, dim, count, index):
    parts = tensor.chunk(count, dim)
    return parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)


CASES = [
    ((12, 6), (2, 2), placements)
    for placements in [
        (ROWS, S1), (S1, ROWS), (ROWS, R), (P, ROWS), (ELEMENTS, R), (ELEMENTS, S1), (OWNED, S1),
        (StridedRaggedShard((0,), (1, 5), 2), S0), (S0, RaggedShard((0,), (1, 5))),
        (StridedRaggedShard((0, 1), (5, 7), 2), S0),
        (RaggedShard((0,), (1, 5)), InterleavedShard(1, 3)),
        (StridedRaggedShard((0,), (1, 5), 2), InterleavedShard(0, 3)),
        (InterleavedShard(0, 3), RaggedShard((0, 1), (7, 11))),
        (InterleavedShard(0, 4), S1), (S0, InterleavedShard(1, 2)), (InterleavedShard(1, 6), R),
        (InterleavedShard(0, 2), InterleavedShard(1, 3)), (S0, S0), (S1, S1),
        (_StridedShard(0, split_factor=2), S0),
        (_StridedShard(0, split_factor=2), InterleavedShard(1, 1)),
    ]
] + [
    ((7, 5), (3,), (S0,)),
    ((7, 5), (2, 2), (StridedRaggedShard((0,), (3, 1), 2, 1), S0)),
    ((7, 5), (2, 2), (S0, RaggedShard((0, 1), (1, 9), 2))),
    ((3, 2, 2), (2, 4), (StridedRaggedShard((0, 1, 2), (3, 1), 4, 1), S0)),
    ((10, 3), (2, 3), (StridedRaggedShard((0,), (1, 1), 3, 2), InterleavedShard(0, 2))),
    ((7, 5), (4, 2), (S0, InterleavedShard(1, 5))),
    ((10, 4), (2, 3), (StridedRaggedShard((1, 0)[::-1], (1, 3), 3), S0)),
    ((4, 3, 5), (2, 2), (RaggedShard((0, 1), (1, 5)), Shard(2))),
    ((4, 2, 3, 3), (2, 2), (RaggedShard((0, 1, 2), (1, 11)), Shard(1))),
    ((0, 4), (2, 2), (RaggedShard((0,), (2, 1)), S1)),
    ((), (2, 2), (OWNED, R)),
    ((6,), (2, 2), (R, RaggedShard((0,), (0, 1)))),
]  # fmt: skip


def case_id(case):
    shape, mesh_shape, placements = case
    names = ".".join(map(str, placements))
    return f"mesh{'x'.join(map(str, mesh_shape))}-{names}-{'x'.join(map(str, shape)) or 'scalar'}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_local_shape_is_that_of_cutting_a_tensor(case):
    shape, mesh_shape, placements = case
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
        with fake_mesh(mesh_shape, rank=rank) as mesh:
            expected = tuple(local(numbers, placements, mesh_shape, coordinate).shape)
            assert local_shape(shape, mesh, placements) == expected, coordinate
            check_placements(shape, mesh, placements)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_even_shape_is_every_ranks_or_none(case):
    shape, mesh_shape, placements = case
    if ragged_axis(placements) is not None:
        with pytest.raises(ValueError, match="expected placements that are not ragged"):
            even_shape(shape, mesh_shape, placements)
        return
    found = set()
    for rank in range(torch.Size(mesh_shape).numel()):
        with fake_mesh(mesh_shape, rank=rank) as mesh:
            found.add(local_shape(shape, mesh, placements))
    assert even_shape(shape, mesh_shape, placements) == (found.pop() if len(found) == 1 else None)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_largest_shape_is_that_of_all_ranks(case):
    shape, mesh_shape, placements = case
    if ragged_axis(placements) is not None:
        with pytest.raises(ValueError, match="largest_shape: expected placements that are not"):
            largest_shape(shape, mesh_shape, placements)
        return
    found = []
    for rank in range(torch.Size(mesh_shape).numel()):
        with fake_mesh(mesh_shape, rank=rank) as mesh:
            found.append(local_shape(shape, mesh, placements))
    assert largest_shape(shape, mesh_shape, placements) == tuple(map(max, zip(*found, strict=True)))


def test_chunks_that_are_uneven_make_no_even_shape():
    assert even_shape((6, 4), (2,), (InterleavedShard(0, 2),)) is None  # 3 rows a chunk
    assert even_shape((6, 4), (2,), (InterleavedShard(0, 3),)) == (3, 4)


def test_the_base_of_an_axis_is_what_the_others_leave():
    with fake_mesh((2, 2)) as mesh:
        assert base_shape((12, 6), mesh, (ROWS, S1), 0) == (12, 3)
        assert base_shape((12, 6), mesh, (ROWS, S1), 1) == (3, 6)
        assert base_shape((12, 6), mesh, (InterleavedShard(0, 3), ROWS), 1) == (6, 6)


def test_which_placements_are_ours():
    ragged_and_interleaved = [
        ROWS,
        OWNED,
        StridedRaggedShard((0,), (1, 1), 2),
        InterleavedShard(0, 2),
    ]
    for placement in ragged_and_interleaved:
        assert is_custom(placement)
        assert any_custom((R, placement))
    native = [R, S0, P, _StridedShard(0, split_factor=2)]
    assert not any(map(is_custom, native))
    assert not any_custom(native)


def test_the_ragged_axis():
    assert ragged_axis((R, ROWS)) == 1
    assert ragged_axis((StridedRaggedShard((0,), (1, 1), 2), S0)) == 0
    assert ragged_axis((InterleavedShard(0, 2), S0)) is None


def test_another_placement_on_an_axis():
    assert replace_axis((R, S0, S1), 1, ROWS) == (R, ROWS, S1)


@pytest.mark.parametrize(
    "placement", [S1, _StridedShard(1, split_factor=2), InterleavedShard(1, 2)]
)
def test_what_cuts_a_dim_on_its_own(placement):
    assert dim_of(placement) == 1


@pytest.mark.parametrize("placement", [R, P, ROWS, ELEMENTS])
def test_what_cuts_no_dim_on_its_own(placement):
    assert dim_of(placement) is None


def test_a_spec_with_other_placements_is_of_the_same_tensor():
    meta = TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32)
    with fake_mesh((2,)) as mesh:
        spec = with_placements(DTensorSpec(mesh, (R,), tensor_meta=meta), (ROWS,))
        assert (spec.mesh, spec.placements, tensor_meta_of(spec)) == (mesh, (ROWS,), meta)
        other = TensorMeta(torch.Size((8, 3)), (3, 1), torch.float32)
        assert tensor_meta_of(with_placements(spec, (S0,), other)) == other
