"""``Picture``, and how the gallery writes figures: one style, a white background, small files."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from PIL import Image

from integration.report.palette import LIGHT

#: The most bytes of a PNG, which belongs in a repository.
MOST_BYTES = 200_000
_WIDTH_INCHES = 7.5
_DPI = 170


@dataclass(frozen=True)
class Picture:
    """One picture of the gallery.

    Attributes:
        file: its file, whose name without the suffix is the picture's name.
        draw: returns the content of the file.
    """

    file: str
    draw: Callable[[], bytes]

    @property
    def name(self) -> str:
        """The picture's name on the command line."""
        return Path(self.file).stem


def gallery_figure(height_inches: float) -> Figure:
    """Returns an empty figure with the gallery's width and a white background."""
    return Figure(
        figsize=(_WIDTH_INCHES, height_inches),
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08),
        facecolor=LIGHT.background,
    )


def rank_colour(rank: int) -> str:
    """Returns the colour of a rank, the same in every picture."""
    return LIGHT.series[rank % len(LIGHT.series)]


def add_legend(figure: Figure, colours: Mapping[str, str], columns: int) -> None:
    """Adds a legend below a figure, with a patch for each colour by its label."""
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in colours.items()],
        loc="outside lower center", ncols=columns, frameon=False, fontsize=9,
    )  # fmt: skip


def as_png(figure: Figure) -> bytes:
    """Returns a figure as a small PNG; errors are those of `compressed`."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    return compressed(drawn)


def compressed(image: Path | io.BytesIO) -> bytes:
    """Returns an image as PNG of at most 256 colours, which makes it several times smaller.

    Raises:
        ValueError: it has more than `MOST_BYTES`.
    """
    result = io.BytesIO()
    reduced = Image.open(image).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(result, format="PNG", optimize=True)
    if result.tell() > MOST_BYTES:
        raise ValueError(
            f"picture: expected at most {MOST_BYTES} bytes, got {result.tell()}; draw less, or a "
            f"smaller figure"
        )
    return result.getvalue()
