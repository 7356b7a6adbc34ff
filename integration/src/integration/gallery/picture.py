"""``Picture``, and how the gallery writes figures: one style, a white background, small files."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from integration.report.palette import LIGHT

#: The most bytes of a PNG, which belongs in a repository.
MOST_BYTES = 200_000
WIDTH_INCHES = 7.5
_DPI = 170


@dataclass(frozen=True)
class Picture:
    """One picture of the gallery.

    Attributes:
        file: its file, whose name without the suffix is the picture's name.
        draw: returns the content of the file.
        is_measured: whether it shows times of this machine. ``python -m integration.gallery``
            without names draws those too.
    """

    file: str
    draw: Callable[[], bytes]
    is_measured: bool = False

    @property
    def name(self) -> str:
        """The picture's name on the command line."""
        return Path(self.file).stem


def gallery_figure(height_inches: float, width_inches: float = WIDTH_INCHES) -> Figure:
    """Returns an empty figure with the gallery's width and a white background."""
    return Figure(
        figsize=(width_inches, height_inches),
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08),
        facecolor=LIGHT.background,
    )


def rank_colour(rank: int) -> str:
    """Returns the colour of a rank, the same in every picture."""
    return LIGHT.series[rank % len(LIGHT.series)]


def as_svg(figure: Figure) -> bytes:
    """Returns a figure as SVG with its background; the same figure has the same bytes."""
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "gallery"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def as_png(figure: Figure) -> bytes:
    """Returns a figure as PNG of at most 256 colours, which makes it several times smaller.

    Raises:
        ValueError: it has more than `MOST_BYTES`.
    """
    drawn, result = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(result, format="PNG", optimize=True)
    if result.tell() > MOST_BYTES:
        raise ValueError(
            f"as_png: expected at most {MOST_BYTES} bytes, got {result.tell()}; draw less, or a "
            f"smaller figure"
        )
    return result.getvalue()
