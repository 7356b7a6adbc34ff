"""Layout: every question it answers, against a map of the buffer element by element."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_shard.planner import Interval, Layout, TensorSlice, TensorSpec, plan_layout, verify


@st.composite
def tensor_specs(draw):
    specs = []
    for i in range(draw(st.integers(0, 6))):
        numel = draw(st.integers(0, 40))
        block = draw(st.integers(1, max(numel, 1)) | st.just(max(numel, 1)))
        specs.append(TensorSpec(f"t{i}", numel, block))
    return specs


@st.composite
def layouts(draw):
    return plan_layout(
        draw(tensor_specs()),
        draw(st.integers(1, 9)),
        alignment=draw(st.integers(1, 5)),
        align_starts=draw(st.booleans()),
        order=draw(st.sampled_from(["given", "block", "shape", "best"])),
        node_limit=draw(st.sampled_from([1, 3, 20_000])),
    )


def buffer_of(layout):
    """What each element of the buffer is: (tensor, element) or None."""
    buffer = [None] * layout.buffer_size
    for i, spec in enumerate(layout.specs):
        for element in range(spec.numel):
            assert buffer[layout.starts[i] + element] is None
            buffer[layout.starts[i] + element] = (i, element)
    return buffer


def shards_of(layout):
    buffer, size = buffer_of(layout), layout.shard_size
    return [buffer[rank * size : (rank + 1) * size] for rank in range(layout.world_size)]


@given(layouts())
def test_a_planned_layout_verifies(layout):
    verify(layout)


@given(layouts())
def test_no_block_has_elements_on_two_ranks(layout):
    rank_of = {}
    for rank, shard in enumerate(shards_of(layout)):
        for place in filter(None, shard):
            i, element = place
            block = element // layout.specs[i].block
            assert rank_of.setdefault((i, block), rank) == rank


@given(layouts())
def test_shards_and_starts_are_aligned(layout):
    assert layout.shard_size % layout.alignment == 0
    if layout.align_starts:
        assert all(start % layout.alignment == 0 for start in layout.starts)


@given(layouts())
def test_tensors_follow_one_another_in_the_order(layout):
    assert sorted(layout.order) == list(range(len(layout.specs)))
    end = 0
    for i in layout.order:
        assert layout.starts[i] >= end
        end = layout.starts[i] + layout.specs[i].numel


@given(layouts())
def test_sizes_add_up(layout):
    occupied = [place for place in buffer_of(layout) if place]
    assert layout.total == len(occupied) == sum(spec.numel for spec in layout.specs)
    assert layout.padding == layout.buffer_size - len(occupied) >= 0
    assert layout.padding_ratio == (layout.padding / len(occupied) if occupied else 0)


@given(layouts())
def test_bounds_are_bounds(layout):
    assert (layout.lower_bound - 1) * layout.world_size < layout.total or layout.total == 0
    assert layout.lower_bound * layout.world_size >= layout.total
    assert layout.lower_bound <= layout.proved_lower_bound <= layout.shard_size
    assert layout.exact == (layout.proved_lower_bound == layout.shard_size)


@given(layouts())
def test_parts_are_what_each_shard_holds(layout):
    for rank, shard in enumerate(shards_of(layout)):
        occupied = [None] * layout.shard_size
        for part in layout.parts(rank):
            assert part.interval.size > 0
            assert part.interval == layout.part(part.tensor, rank)
            for k in range(part.interval.size):
                assert occupied[part.offset + k] is None
                occupied[part.offset + k] = (part.tensor, part.interval.start + k)
        assert occupied == shard
        offsets = [part.offset for part in layout.parts(rank)]
        assert offsets == sorted(offsets)


@given(layouts())
def test_owners_are_the_ranks_with_a_part(layout):
    for i in range(len(layout.specs)):
        ranks = [rank for rank in range(layout.world_size) if layout.part(i, rank).size]
        assert list(layout.owners(i)) == ranks


@given(layouts())
def test_units_are_ragged_shards_local_units(layout):
    for i, spec in enumerate(layout.specs):
        unit, units = layout.unit_size(i), layout.units(i)
        assert len(units) == layout.world_size
        assert sum(units) * unit == spec.numel
        assert spec.block % unit == 0
        assert [count * unit for count in units] == [
            layout.part(i, rank).size for rank in range(layout.world_size)
        ]


@given(layouts())
def test_parts_of_a_tensor_join_without_a_gap(layout):
    for i, spec in enumerate(layout.specs):
        end = 0
        for rank in layout.owners(i):
            assert layout.part(i, rank).start == end
            end = layout.part(i, rank).stop
        assert end == spec.numel


@given(layouts())
def test_padding_intervals_are_the_rest_of_the_buffer(layout):
    padded = [k for gap in layout.padding_intervals() for k in range(gap.start, gap.stop)]
    assert padded == [k for k, place in enumerate(buffer_of(layout)) if place is None]
    gaps = layout.padding_intervals()
    assert all(gap.size > 0 for gap in gaps)
    assert all(a.stop < b.start for a, b in pairwise(gaps))


@given(tensor_specs(), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=50)
def test_coarser_blocks_and_alignment_never_shrink_the_shard(specs, world_size, alignment):
    free = [TensorSpec(spec.name, spec.numel) for spec in specs]
    least = plan_layout(free, world_size).shard_size
    assert least == plan_layout(free, world_size).lower_bound
    shard = plan_layout(specs, world_size).shard_size
    aligned = plan_layout(specs, world_size, alignment=alignment).shard_size
    starts = plan_layout(specs, world_size, alignment=alignment, align_starts=True).shard_size
    assert least <= shard <= aligned <= starts


EXAMPLE = plan_layout([TensorSpec("a", 6, 4), TensorSpec("b", 0), TensorSpec("c", 5, 5)], 3)


def test_an_example_by_hand():
    assert EXAMPLE.shard_size == 5
    assert EXAMPLE.starts == (1, 7, 10)
    assert EXAMPLE.units(0) == (2, 1, 0)
    assert EXAMPLE.unit_size(0) == 2
    assert EXAMPLE.units(1) == (0, 0, 0)
    assert EXAMPLE.units(2) == (0, 0, 1)
    assert EXAMPLE.parts(1) == (TensorSlice(0, Interval(4, 6), 0),)
    assert EXAMPLE.padding_intervals() == (Interval(0, 1), Interval(7, 10))
    assert EXAMPLE.padding_ratio == 4 / 11


def test_layouts_are_values():
    again = plan_layout(EXAMPLE.specs, 3)
    assert again == EXAMPLE
    assert hash(again) == hash(EXAMPLE)
    assert isinstance(again, Layout)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: EXAMPLE.units(3), "tensor: expected 0 to 2... got 3"),
        (lambda: EXAMPLE.unit_size(-1), "tensor: expected 0 to 2... got -1"),
        (lambda: EXAMPLE.owners(3), "tensor: expected 0 to 2... got 3"),
        (lambda: EXAMPLE.part(0, 3), "rank: expected 0 to 2... got 3"),
        (lambda: EXAMPLE.part(5, 0), "tensor: expected 0 to 2... got 5"),
        (lambda: EXAMPLE.parts(-1), "rank: expected 0 to 2... got -1"),
    ],
)
def test_a_rank_or_a_tensor_that_there_is_not_is_named(ask, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\.\.", ".*")):
        ask()
