"""The tensors of a buffer, as a table and as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import torch

from dbuffer.placements import LocalTensor, Placements
from ragged_shard.planner import Layout
from ragged_shard.planner.command_line.plot import COLOURS, RANKS_SHOWN

__all__ = ["BufferReport", "TensorReport", "draw", "tensor_reports"]


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a buffer.

    Attributes:
        name: of its spec.
        shape: of this rank's local tensor on the other axes of its mesh; else the layout's.
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
        allocated: whether its memory is allocated.
        nbytes: of the memory on this rank, while it is allocated.
    """

    layout: Layout
    tensors: tuple[TensorReport, ...]
    rank: int
    dtype: torch.dtype
    device: torch.device
    placements: Placements
    allocated: bool
    nbytes: int

    def __str__(self) -> str:
        layout, state = self.layout, "allocated" if self.allocated else "released"
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
        """Draws a bar for each rank's shard, its tensors coloured, padding hatched, as SVG.

        Returns:
            An SVG document that needs nothing else.
        """
        return draw(self.layout, self.rank, str(self.dtype).removeprefix("torch."))


def tensor_reports(
    layout: Layout, local: Sequence[LocalTensor], rank: int, dtype: torch.dtype
) -> tuple[TensorReport, ...]:
    """Returns the tensors of a layout with their parts on a rank of the shard axis."""
    return tuple(
        TensorReport(
            spec.name,
            tensor.shape,
            layout.starts[i],
            layout.owners(i),
            tensor.part_of(layout.part(i, rank)).size,
            _power_of_two_in(layout.starts[i] * dtype.itemsize),
        )
        for i, (spec, tensor) in enumerate(zip(layout.specs, local, strict=True))
    )


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


LEFT, TOP, WIDTH, ROW, BAR = 76, 56, 860, 30, 22  # pixels
CHARACTER = 6.7  # pixels: about the width of one, at the font's size of 12
DARK = ("#0072B2", "#009E73", "#D55E00")  # of the colours: those on which white is read better
STYLE = (
    "<style>text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#222}"
    ".title{font-size:15px;font-weight:bold}.note{fill:#555}.light{fill:#fff}</style>"
)
HATCH = (
    '<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V6" stroke="#555" stroke-width="1.6"/></pattern>'
    "</defs>"
)


def draw(layout: Layout, rank: int, dtype: str) -> str:
    """Draws a layout as SVG.

    Args:
        layout: of the buffer; of many ranks the first and the last are shown, and `rank`.
        rank: whose bar is framed.
        dtype: for the title.

    Returns:
        An SVG document.
    """
    ranks = _shown(layout.world_size, rank)
    height = TOP + ROW * len(ranks) + 34
    size = f'width="{LEFT + WIDTH + 20}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        STYLE,
        HATCH,
        f'<rect {size} fill="#fff"/>',
        _text(16, 24, f"{len(layout.specs)} tensors, {layout.buffer_size:,} x {dtype}", "title"),
        _text(16, 44, _caption(layout, ranks), "note"),
    ]
    for row, shown in enumerate(ranks):
        lines += _bar(layout, shown, TOP + ROW * row, framed=shown == rank)
    end = f"{layout.shard_size:,} elements"
    lines.append(_text(LEFT, height - 14, "0", "note"))
    lines.append(_text(LEFT + WIDTH - CHARACTER * len(end), height - 14, end, "note"))
    return "\n".join([*lines, "</svg>", ""])


def _bar(layout: Layout, rank: int, y: float, *, framed: bool) -> Iterator[str]:
    """Yields a rank's shard: hatched, with its tensors above."""
    yield _text(16, y + 15, f"rank {rank}")
    yield f'<rect {_place(LEFT, y, WIDTH)} fill="url(#padding)"><title>padding</title></rect>'
    scale = WIDTH / max(layout.shard_size, 1)
    for part in layout.parts(rank):
        spec, interval = layout.specs[part.tensor], part.interval
        x, width = LEFT + scale * part.offset, scale * interval.size
        colour = COLOURS[part.tensor % len(COLOURS)]
        what = (
            f"{spec.name}: elements {interval.start:,} to {interval.stop - 1:,} of {spec.numel:,}"
        )
        yield (
            f'<rect {_place(x, y, width)} fill="{colour}" stroke="#fff" stroke-width=".5">'
            f"<title>{escape(what)}</title></rect>"
        )
        if CHARACTER * (len(spec.name) + 1) <= width:
            yield _text(x + CHARACTER / 2, y + 15, spec.name, "light" if colour in DARK else "")
    if framed:
        yield f'<rect {_place(LEFT, y, WIDTH)} fill="none" stroke="#000" stroke-width="1.5"/>'


def _caption(layout: Layout, ranks: list[int]) -> str:
    left_out = layout.world_size - len(ranks)
    more = f"; {left_out:,} ranks are left out" if left_out else ""
    padding = f"{layout.padding:,} elements, {100 * layout.padding_ratio:.2f} %"
    return f"hatched: padding, {padding}; framed: this rank{more}"


def _shown(world_size: int, rank: int) -> list[int]:
    if world_size <= RANKS_SHOWN:
        return list(range(world_size))
    half = RANKS_SHOWN // 2
    return sorted({*range(half), rank, *range(world_size - half, world_size)})


def _place(x: float, y: float, width: float) -> str:
    return f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{BAR}"'


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.2f}" y="{y:.2f}"{kind}>{escape(words)}</text>'
