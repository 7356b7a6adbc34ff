"""The lines of a picture in characters."""

import pytest
from torch.distributed.tensor import Replicate, Shard

from ragged_shard import InterleavedShard, RaggedShard
from ragged_shard.visualization.captions import PALETTE
from ragged_shard.visualization.ownership import ownership
from ragged_shard.visualization.terminal import styled_lines


def plain(found, width=80):
    return [line.plain for line in styled_lines(found, width)]


def test_cells_name_the_ranks_and_have_their_colour():
    found = ownership((2, 2), mesh_shape=(2,), placements=[RaggedShard((0, 1), (3, 1))])
    picture = list(styled_lines(found, 80))
    rows = picture[4:6]
    assert [line.plain for line in rows] == ["0  0  0", "1  0  1"]
    assert [[span.colour for span in line.spans[1:]] for line in rows] == [
        [PALETTE[0], PALETTE[0]],
        [PALETTE[0], PALETTE[1]],
    ]


def test_rows_are_the_leading_dims():
    found = ownership((2, 1, 2, 1), mesh_shape=(2,), placements=[Shard(2)])
    assert plain(found)[3:8] == ["       0", "0,0,0  0", "0,0,1  1", "1,0,0  0", "1,0,1  1"]


def test_headings_of_columns_do_not_touch():
    found = ownership((1, 40000), mesh_shape=(2,), placements=[Shard(1)])
    heading = plain(found)[3]
    numbers = heading.split()
    assert all(number.isdigit() for number in numbers)
    assert [int(number) for number in numbers] == sorted({int(number) for number in numbers})
    assert len(heading) <= 84


def test_a_scalar_and_an_empty_tensor():
    scalar = ownership((), mesh_shape=(4,), placements=[Replicate()])
    assert plain(scalar)[-1].split() == ["0-3", "1", "100.0%", "[()]"]
    empty = ownership((3, 0), mesh_shape=(2,), placements=[Shard(1)])
    assert "The tensor has no elements." in plain(empty)
    assert plain(empty)[-1].split() == ["1", "0", "-", "nothing"]


@pytest.mark.parametrize("width", [55, 80, 160])
def test_no_line_is_wider_than_asked(width):
    found = ownership((128, 512), mesh_shape=(2,), placements=[InterleavedShard(1, 64)])
    picture = plain(found, width)
    assert len(picture) > 25
    assert width - 12 < max(map(len, picture)) <= width


def test_many_ranks_are_not_all_listed():
    found = ownership((256,), mesh_shape=(256,), placements=[Shard(0)])
    picture = plain(found)
    assert picture[-1] == "   and 192 more"
    assert picture[-2].split()[0] == "63"
