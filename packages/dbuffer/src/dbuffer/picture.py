"""A buffer drawn as SVG: which tensor lies on which rank, and where nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ragged_shard.planner import Layout
from ragged_shard.planner.plot import COLOURS, RANKS_SHOWN

__all__ = ["draw"]

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
    """The picture of a layout.

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
    """A rank's shard: hatched, and its tensors over that."""
    yield _text(16, y + 15, f"rank {rank}")
    yield f'<rect {_place(LEFT, y, WIDTH)} fill="url(#padding)"><title>padding</title></rect>'
    scale = WIDTH / max(layout.shard_size, 1)
    for part in layout.parts(rank):
        spec, held = layout.specs[part.tensor], part.interval
        x, width = LEFT + scale * part.offset, scale * held.size
        colour = COLOURS[part.tensor % len(COLOURS)]
        what = f"{spec.name}: elements {held.start:,} to {held.stop - 1:,} of {spec.numel:,}"
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
