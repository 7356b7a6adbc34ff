"""What is printed: with rich and without, for a DTensor and for a shape."""

import io

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from ragged_shard.visualization.ownership import ownership, visualize
from testkit import fake_mesh, run_python

STRIDED = (StridedRaggedShard((0, 1), (5, 7), 2), Shard(0))
PICTURE = """\
tensor (6, 8) on mesh (2, 2)
  axis 0: StridedRaggedShard(dims=(0, 1), local_units=(5, 7), split_factor=2)
  axis 1: Shard(dim=0)

   0  1  2  3  4  5  6  7
0  0  0  0  0  0  0  0  0
1  0  0  2  2  2  2  2  2
2  2  2  2  2  2  2  2  2
3  1  1  1  1  1  1  1  1
4  1  1  3  3  3  3  3  3
5  3  3  3  3  3  3  3  3

   ranks  elements  share  holds
   0            10  20.8%  [0:1, :] [1:2, 0:2]
   1            10  20.8%  [3:4, :] [4:5, 0:2]
   2            14  29.2%  [1:2, 2:8] [2:3, :]
   3            14  29.2%  [4:5, 2:8] [5:6, :]
"""

WITHOUT_RICH = """
import sys
sys.modules["rich"] = None
from torch.distributed.tensor import Shard
from ragged_shard import StridedRaggedShard
from ragged_shard.visualization.ownership import visualize
placements = [StridedRaggedShard((0, 1), (5, 7), 2), Shard(0)]
visualize((6, 8), mesh_shape=(2, 2), placements=placements)
assert "rich.console" not in sys.modules
"""


@pytest.fixture(autouse=True)
def _width(monkeypatch):
    """A terminal's, whatever the tests run in."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def stripped(text):
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def test_a_shape_is_printed_and_returned():
    pytest.importorskip("rich", reason="the extra cli")
    file = io.StringIO()
    found = visualize((6, 8), mesh_shape=(2, 2), placements=STRIDED, file=file)
    assert stripped(file.getvalue()) == PICTURE
    assert found == ownership((6, 8), mesh_shape=(2, 2), placements=STRIDED)


def test_standard_output_is_where_it_goes(capsys):
    visualize((6, 8), mesh_shape=(2, 2), placements=STRIDED)
    assert stripped(capsys.readouterr().out) == PICTURE


def test_without_rich_it_is_the_same_in_plain_characters():
    done = run_python("-c", WITHOUT_RICH)
    assert done.stdout == PICTURE, done.stderr


def test_a_terminal_is_shown_colours(monkeypatch):
    pytest.importorskip("rich", reason="the extra cli")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    visualize((2, 1), mesh_shape=(2,), placements=[Shard(0)], file=file)
    rows = file.getvalue().splitlines()
    blue, orange = "48;2;86;180;233", "48;2;230;159;0"
    assert blue in rows[4]
    assert orange not in rows[4]
    assert orange in rows[5]
    assert blue not in rows[5]


def test_a_dtensor_is_printed_as_its_shape_mesh_and_placements():
    from_shape, from_tensor = io.StringIO(), io.StringIO()
    placements = [RaggedShard((0,), (1, 3)), InterleavedShard(1, 2)]
    with fake_mesh((2, 2), ("fsdp", "tp"), rank=3) as mesh:
        tensor = distribute_tensor(torch.zeros(4, 8), mesh, placements, src_data_rank=None)
        visualize(tensor, file=from_tensor)
    visualize((4, 8), mesh_shape=(2, 2), placements=placements, file=from_shape)
    wanted = from_shape.getvalue().replace("axis 0:", "axis 0 (fsdp):")
    assert from_tensor.getvalue() == wanted.replace("axis 1:", "axis 1 (tp):")


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_a_large_tensor_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    file = io.StringIO()
    placements = [RaggedShard((0,), (1, 3)), Replicate()]
    found = visualize((4096, 14336), mesh_shape=(2, 2), placements=placements, file=file)
    grid = file.getvalue().split("\n\n")[1].splitlines()
    assert max(map(len, grid)) <= columns
    assert len(grid) <= 25
    assert {"0,1", "2,3"} <= set(" ".join(grid[1:]).split())
    assert found.part(2).boxes[0].offsets == (1024, 0)
