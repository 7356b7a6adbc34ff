"""SVG documents, read back as XML."""

import xml.etree.ElementTree as ElementTree

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from ragged_shard.visualization.captions import PALETTE
from ragged_shard.visualization.ownership import Ownership, ownership

NAME = "{http://www.w3.org/2000/svg}"


def drawn(shape, mesh_shape, placements):
    return ElementTree.fromstring(
        ownership(shape, mesh_shape=mesh_shape, placements=placements).svg()
    )


def texts(root, kind=None):
    found = root.iter(f"{NAME}text")
    return [t.text for t in found if kind is None or kind in t.get("class", "").split()]


def inside(root):
    """The labels of the cells: drawn over a part's colour."""
    return [t.text for t in root.iter(f"{NAME}text") if t.get("paint-order")]


def rectangles(root, fill):
    """Sizes of the rectangles of the grid, which come before those of the legend."""
    return [
        (float(r.get("width")), float(r.get("height")))
        for r in root.iter(f"{NAME}rect")
        if r.get("fill") == fill
    ]


def test_every_element_of_a_small_tensor_names_its_rank():
    root = drawn((6, 8), (2, 2), [StridedRaggedShard((0, 1), (5, 7), 2), Shard(0)])
    assert sorted(inside(root)) == sorted("0" * 10 + "1" * 10 + "2" * 14 + "3" * 14)
    assert texts(root)[:3] == [
        "tensor (6, 8) on mesh (2, 2)",
        "axis 0: StridedRaggedShard(dims=(0, 1), local_units=(5, 7), split_factor=2)",
        "axis 1: Shard(dim=0)",
    ]


def test_the_area_of_a_colour_is_the_parts_share():
    root = drawn((8, 6), (4,), [RaggedShard((0,), (1, 3, 0, 4))])
    areas = []
    for fill in PALETTE[:4]:
        *grid, legend = rectangles(root, fill)
        assert legend == (24, 14)
        areas.append(sum(width * height for width, height in grid))
    assert [area / sum(areas) for area in areas] == pytest.approx([1 / 8, 3 / 8, 0, 4 / 8])


def test_a_large_tensor_names_a_rank_once_for_a_block_and_where_it_begins():
    root = drawn((4096, 14336), (2, 2), [RaggedShard((0,), (1, 4095)), Shard(1)])
    assert inside(root) == ["0", "1", "2", "3"]
    assert texts(root, "index") == ["0", "7168", "0", "1"]


@pytest.mark.parametrize(
    ("placements", "pattern"),
    [
        ([Shard(0), Shard(1)], None),
        ([Replicate(), Shard(1)], "url(#copies)"),
        ([Partial(), Shard(1)], "url(#terms)"),
    ],
    ids=["one-owner", "copies", "terms"],
)
def test_several_holders_have_a_pattern(placements, pattern):
    root = drawn((4, 4), (2, 2), placements)
    found = {r.get("fill") for r in root.iter(f"{NAME}rect")}
    assert {fill for fill in found if fill.startswith("url")} == ({pattern} if pattern else set())
    if pattern:
        defined = {f"url(#{p.get('id')})" for p in root.iter(f"{NAME}pattern")}
        assert pattern in defined


def test_the_legend_says_what_each_rank_holds():
    root = drawn((12, 4), (2, 2), [Replicate(), InterleavedShard(0, 3)])
    found = texts(root)
    at = found.index("holds") + 1
    assert found[at:] == [
        "0,2", "24", "50.0%", "[0:2, :] [4:6, :] [8:10, :]",
        "1,3", "24", "50.0%", "[2:4, :] [6:8, :] [10:12, :]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements"),
    [
        ((), (4,), [Replicate()]),
        ((0, 3), (2,), [Shard(0)]),
        ((5,), (8,), [Shard(0)]),
        ((2, 3, 4, 5), (2, 2), [Shard(3), Shard(1)]),
        ((1024, 1024), (4,), [InterleavedShard(0, 128)]),
        ((4096,), (1024,), [Shard(0)]),
    ],
    ids=["scalar", "empty", "uneven", "four-dims", "fine", "many-ranks"],
)
def test_everything_is_within_the_document(shape, mesh_shape, placements):
    root = drawn(shape, mesh_shape, placements)
    width, height = float(root.get("width")), float(root.get("height"))
    for element in [*root.iter(f"{NAME}rect"), *root.iter(f"{NAME}text")]:
        assert 0 <= float(element.get("x", 0)) <= width
        assert 0 <= float(element.get("y", 0)) <= height
        assert float(element.get("x", 0)) + float(element.get("width", 0)) <= width
        assert float(element.get("y", 0)) + float(element.get("height", 0)) <= height
    assert len(list(root.iter(f"{NAME}text"))) < 5000


def test_a_tensor_without_elements_says_so():
    assert "The tensor has no elements." in texts(drawn((0, 3), (2,), [Shard(0)]))


def test_names_are_escaped():
    found = ownership((4,), mesh_shape=(2,), placements=[Shard(0)])
    odd = Ownership(found.shape, found.mesh_shape, found.placements, found.parts, ("<a&b>",))
    root = ElementTree.fromstring(odd.svg())
    assert "axis 0 (<a&b>): Shard(dim=0)" in texts(root)
