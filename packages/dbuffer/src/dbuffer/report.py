"""What is in a buffer, in words and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dbuffer.base import BufferBase
from dbuffer.placing import Placements
from dbuffer.views import tensor_shape
from ragged_shard.planner import Layout

__all__ = ["BufferReport", "TensorReport", "report"]


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a buffer.

    Attributes:
        name: of its spec.
        shape: as the layout has it.
        start: its first element's place in the whole buffer.
        ranks: of the shard axis, that hold a part of it.
        local: elements that this rank's shard has of it.
        aligned: the largest power of two of bytes, up to 4096, that its start is a multiple of.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    ranks: range
    local: int
    aligned: int


@dataclass(frozen=True)
class BufferReport:
    """A buffer at one moment; `str` makes a table.

    Attributes:
        layout: of the tensors.
        tensors: in the order of the layout.
        rank: whose report it is, on the shard axis.
        dtype: of all tensors.
        device: of the memory.
        placements: of the buffer.
        held: whether its memory is held.
        nbytes: of the memory on this rank, while it is held.
    """

    layout: Layout
    tensors: tuple[TensorReport, ...]
    rank: int
    dtype: torch.dtype
    device: torch.device
    placements: Placements
    held: bool
    nbytes: int

    def __str__(self) -> str:
        layout, state = self.layout, "held" if self.held else "released"
        lines = [
            f"{len(self.tensors)} tensors of {self.dtype} on {self.device}, placed "
            f"{', '.join(map(str, self.placements))}; {self.nbytes:,} bytes on this rank, {state}",
            f"{layout.world_size} shards of {layout.shard_size:,} elements, padding "
            f"{layout.padding:,} ({100 * layout.padding_ratio:.2f} % of the tensors)",
        ]
        head = ("tensor", "shape", "start", "ranks", f"on rank {self.rank}", "aligned to", "name")
        rows = [
            (
                str(i),
                "x".join(map(str, tensor.shape)) or "scalar",
                f"{tensor.start:,}",
                _span(tensor.ranks),
                f"{tensor.local:,}",
                str(tensor.aligned),
                tensor.name,
            )
            for i, tensor in enumerate(self.tensors)
        ]
        return "\n".join([*lines, _table([head, *rows])])

    def svg(self) -> str:
        """A picture: a bar for each rank's shard, its tensors coloured, padding hatched.

        Returns:
            An SVG document that needs nothing else.
        """
        from dbuffer.picture import draw

        return draw(self.layout, self.rank, str(self.dtype).removeprefix("torch."))


def report(buffer: BufferBase) -> BufferReport:
    """What `DBuffer.report` returns."""
    layout = buffer.layout
    tensors = tuple(
        TensorReport(
            spec.name,
            tensor_shape(layout, i),
            layout.starts[i],
            layout.owners(i),
            layout.part(i, buffer.rank).size,
            _power_of_two_in(layout.starts[i] * buffer.dtype.itemsize),
        )
        for i, spec in enumerate(layout.specs)
    )
    return BufferReport(
        layout, tensors, buffer.rank, buffer.dtype, buffer.device, buffer.placements, buffer.held,
        buffer.nbytes,
    )  # fmt: skip


def _power_of_two_in(nbytes: int) -> int:
    return min(nbytes & -nbytes, 4096) if nbytes else 4096


def _span(ranks: range) -> str:
    if not ranks:
        return "none"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest; to the right, the last to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([*cells[:-1], row[-1]]).rstrip())
    return "\n".join(lines)
