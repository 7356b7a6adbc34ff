"""Reports: the table, and the picture."""

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from dbuffer import DBuffer
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import fake_mesh

SPECS = [
    TensorSpec("w<1>", 12, 6, (2, 6)), TensorSpec("bias", 3), TensorSpec("none", 0),
    TensorSpec("s", 1, 1, ()),
]  # fmt: skip
S0 = Shard(0)
SVG = "{http://www.w3.org/2000/svg}"


def reported(world_size, rank, placements=(S0,)):
    layout = plan_layout(SPECS, world_size, alignment=4, align_starts=True)
    with fake_mesh((world_size,), rank=rank) as mesh:
        buffer = DBuffer(layout, mesh, placements, torch.float32)
        allocated = buffer.report()
        buffer.release()
        return allocated, buffer.report()


def test_the_table_says_where_each_tensor_lies():
    allocated, released = reported(2, 1)
    lines = str(allocated).splitlines()
    assert lines[0].endswith("48 bytes on this rank, allocated")
    assert str(released).splitlines()[0].endswith("released")
    assert "2 shards of 12 elements, padding 8 (50.00 % of the tensors)" in lines[1]
    head = "tensor shape start ranks on rank 1 aligned to name"
    assert lines[2].split() == head.split()
    rows = [line.split() for line in lines[3:]]
    assert [row[-1] for row in rows] == [spec.name for spec in SPECS]
    assert [row[1] for row in rows] == ["2x6", "3", "0", "scalar"]
    assert sum(int(row[4]) for row in rows) == 4
    assert all(tensor.aligned >= 16 for tensor in allocated.tensors)
    assert rows[2][3] == "none"


@pytest.mark.parametrize("world_size", [1, 2, 48])
def test_the_picture_covers_every_shard(world_size):
    report, _ = reported(world_size, world_size // 2)
    root = ElementTree.fromstring(report.svg())
    rects = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    titles = [rect.find(f"{SVG}title").text for rect in rects]
    drawn = {title.split(":")[0] for title in titles} - {"padding"}
    assert drawn == {"w<1>", "bias", "s"}
    bars = [rect for rect in rects if rect.get("fill") == "url(#padding)"]
    assert len(bars) == min(world_size, 33)
    assert sum(rect.get("stroke") == "#000" for rect in root.iter(f"{SVG}rect")) == 1
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert any("left out" in text for text in texts) == (world_size > 32)
    assert "http" not in report.svg().replace("http://www.w3.org/2000/svg", "")


def test_widths_are_proportions_of_the_shard():
    report, _ = reported(1, 0)
    root = ElementTree.fromstring(report.svg())
    widths = {
        rect.find(f"{SVG}title").text.split(":")[0]: float(rect.get("width"))
        for rect in root.iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    }
    assert widths["w<1>"] == pytest.approx(widths["padding"] * 12 / 20, abs=0.01)


def test_an_unsharded_buffer_reports_all_its_bytes():
    allocated, _ = reported(2, 0, [Replicate()])
    assert allocated.nbytes == 2 * 12 * 4
