"""The words of pictures: ranks, boxes, shares and remarks in few characters."""

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_shard import InterleavedShard, RaggedShard
from ragged_shard.geometry.boxes import TensorBox
from ragged_shard.visualization.captions import (
    PALETTE,
    box_text,
    boxes_text,
    colour,
    headings,
    label,
    ranks_text,
    remarks,
    share_text,
)
from ragged_shard.visualization.grid import grid
from ragged_shard.visualization.ownership import Ownership, ownership
from ragged_shard.visualization.parts import RankPart


@pytest.mark.parametrize(
    ("ranks", "text", "short"),
    [
        ((3,), "3", "3"),
        ((0, 1), "0,1", "0,1"),
        ((0, 1, 2, 3), "0-3", "0-3"),
        ((0, 2, 4), "0,2,4", "0,2,4"),
        ((0, 2, 4, 6), "0,2,4,6", "0…"),
        ((10, 11, 12, 15), "10-12,15", "10…"),
        ((0, 1, 4, 5), "0,1,4,5", "0…"),
    ],
)
def test_ranks_are_runs_and_short_in_a_cell(ranks, text, short):
    assert ranks_text(ranks) == text
    assert label(ranks) == short


@pytest.mark.parametrize(
    ("box", "shape", "text"),
    [
        (TensorBox((0, 2), (4, 3)), (4, 8), "[:, 2:5]"),
        (TensorBox((1,), (1,)), (4,), "[1:2]"),
        (TensorBox((), ()), (), "[()]"),
    ],
)
def test_a_box_is_an_index(box, shape, text):
    assert box_text(box, shape) == text


PART = RankPart((0,), tuple(TensorBox((start,), (1,)) for start in range(0, 8, 2)))


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (80, "[0:1] [2:3] [4:5] [6:7]"),
        (22, "[0:1] [2:3] and 2 more"),
        (21, "[0:1] and 3 more"),
        (0, "[0:1] and 3 more"),
    ],
)
def test_as_many_boxes_as_fit(width, text):
    assert boxes_text(PART, (8,), width) == text


def test_an_empty_shard_holds_nothing():
    assert boxes_text(RankPart((0,), ()), (8,), 80) == "nothing"


def test_all_boxes_are_shown_where_just_they_fit():
    assert boxes_text(PART, (8,), 23) == "[0:1] [2:3] [4:5] [6:7]"


@pytest.mark.parametrize(
    ("units", "texts"),
    [((1, 3), ["25.0%", "75.0%"]), ((0, 1), ["0.0%", "100.0%"]), ((1, 4095), ["<0.1%", "100.0%"])],
)
def test_shares(units, texts):
    found = ownership((4096,), mesh_shape=(2,), placements=[RaggedShard((0,), units)])
    assert [share_text(part, found) for part in found.parts] == texts


def test_a_tensor_without_elements_has_no_shares():
    found = ownership((0,), mesh_shape=(2,), placements=[Shard(0)])
    assert [share_text(part, found) for part in found.parts] == ["-", "-"]


def test_headings_name_the_tensor_and_the_axes():
    found = ownership((4, 6), mesh_shape=(2, 2), placements=[Replicate(), Shard(1)])
    assert headings(found) == (
        "tensor (4, 6) on mesh (2, 2)",
        "  axis 0: Replicate()",
        "  axis 1: Shard(dim=1)",
    )
    named = Ownership(found.shape, (2, 2), found.placements, found.parts, ("dp", "tp"))
    assert headings(named)[1:] == ("  axis 0 (dp): Replicate()", "  axis 1 (tp): Shard(dim=1)")


SCALED = "Not to scale: headings are the cells' first indices."
COPIES = "Where a cell has several ranks, each has a copy."
TERMS = "Axis 0 is Partial(max): its ranks have terms of the values."


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements", "expected"),
    [
        ((4, 4), (2, 2), (Shard(0), Shard(1)), ()),
        ((4, 4), (2, 2), (Replicate(), Shard(1)), (COPIES,)),
        ((4, 4), (1, 2), (Replicate(), Shard(1)), ()),
        ((4, 4), (2, 2), (Partial("max"), Shard(1)), (TERMS,)),
        ((4, 4), (2, 2), (Partial("max"), Replicate()), (COPIES, TERMS)),
        ((99, 4), (2, 2), (Shard(0), Shard(1)), (SCALED,)),
        ((0, 4), (2, 2), (Shard(0), Shard(1)), ("The tensor has no elements.",)),
        (
            (64, 4),
            (2,),
            (InterleavedShard(0, 16),),
            ("Too large to be drawn completely: this is [0:16, :].", SCALED),
        ),
    ],
)
def test_remarks_are_made_where_they_apply(shape, mesh_shape, placements, expected):
    found = ownership(shape, mesh_shape=mesh_shape, placements=placements)
    assert remarks(found, grid(found, 8, 8)) == expected


def test_colours_repeat_after_the_last():
    assert len(set(PALETTE)) == 8
    assert [colour(n) for n in range(8)] == list(PALETTE)
    assert colour(9) == PALETTE[1]
