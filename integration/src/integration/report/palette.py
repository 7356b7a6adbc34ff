"""The colour and the marker of every system, the same in every figure and table.

A style depends on a system's name alone, not on which results are shown beside it. No two systems
have both the colour and the marker in common, so that they differ without colour vision too.
"""

import functools
import zlib
from dataclasses import dataclass

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d")

# The system that others are compared with.
_REFERENCE = "single"
# In the order of their styles: the first have a colour of their own.
_NAMES = (
    *("ddp", "fsdp1", "fsdp2", "fsdp", "deepspeed", "titan-fsdp"),
    *("plan-fsdp", "dtensor-tp", "titan-tp-sp", "plan-tp-sp", "plan-fsdp-ep"),
    # Sources of random numbers.
    *("dist-rng", "native"),
    *("plan-dp", "plan-dp-static", "plan-zero3", "plan-tp", "plan-tp-sp-static"),
    *("plan-tp-sp-loss", "plan-hsdp", "plan-fsdp-tp", "plan-dp-tp-sp", "plan-dp-tp-sp-static"),
    *("plan-cp-ring", "plan-cp-all-gather", "plan-cp-ulysses", "plan-dp-cp-ring"),
    *("plan-cp-tp-sp", "plan-ep", "plan-ep-static", "plan-tp-sp-ep", "plan-fsdp4-ep2"),
    *("plan-dp-tp-sp-ep", "plan-dp-tp-sp-ep-static", "plan-hsdp-tp"),
    *("titan-tp-sp-loss", "titan-fsdp-tp-sp-loss", "titan-fsdp-tp-sp"),
    *("pp-GPipe", "pp-1F1B", "pp-Interleaved1F1B"),
    *("pp-InterleavedZeroBubble", "pp-ZBVZeroBubble", "pp-DualPipeV"),
    *("pp-1F1B-ddp", "pp-1F1B-fsdp", "pp-1F1B-plan-tp-sp", "plan-fsdp-tp-sp-static"),
    *("plan-fsdp-cp-ring", "plan-hsdp-ep", "pp-1F1B-plan-dp", "pp-1F1B-plan-fsdp"),
    *("pp-Interleaved1F1B-plan-fsdp-static", "pp-1F1B-plan-zero3", "pp-1F1B-plan-cp-ring"),
    *("pp-ZBVZeroBubble-plan-tp-sp-static", "pp-1F1B-plan-tp-sp-loss", "pp-1F1B-plan-fsdp-ep"),
    "pp-GPipe-plan-fsdp-ep-static",
)


@dataclass(frozen=True)
class Theme:
    """The colours of one background.

    Attributes:
        reference: colour of the reference's curve and bars.
        series: colours of the other systems.
    """

    ink: str
    muted: str
    grid: str
    background: str
    reference: str
    series: tuple[str, ...]


# The first five series are Okabe and Ito's colours (https://jfly.uni-koeln.de/color), on dark
# lightened; the others are far from these and from each other, with red-green deficiencies too.
LIGHT = Theme(
    ink="#1c2024",
    muted="#5d666f",
    grid="#e3e6e9",
    background="#ffffff",
    reference="#a7b0ba",
    series=(
        *("#0072b2", "#d55e00", "#009e73", "#b5548c", "#c98500", "#3f9fd6"),
        *("#7d6b5d", "#660088", "#1f1fe0", "#224422", "#9966ff", "#990055"),
    ),
)
DARK = Theme(
    ink="#e8eaed",
    muted="#a0a8b0",
    grid="#32383f",
    background="#1a1d21",
    reference="#6f7a85",
    series=(
        *("#56b4e9", "#f08040", "#2cc99b", "#e39ac4", "#f0c040", "#c4e6ff"),
        *("#a08c72", "#a040d0", "#5566ee", "#3f8f3f", "#b79cff", "#e03070"),
    ),
)


@dataclass(frozen=True)
class Style:
    """The colour and marker of one system."""

    colour: str
    marker: str


def style_of(name: str, theme: Theme) -> Style:
    """Returns the style of a system, or of a source of random numbers.

    A name that this module does not list has a style that no listed name has.
    """
    if name == _REFERENCE:
        return Style(theme.reference, "")
    place = _places().get(name)
    if place is None:
        free = range(len(_NAMES), len(theme.series) * len(MARKERS))
        place = free[zlib.crc32(name.encode()) % len(free)]
    # The numbers of colours and of markers are coprime: every place has its own pair.
    return Style(theme.series[place % len(theme.series)], MARKERS[place % len(MARKERS)])


@functools.cache
def _places() -> dict[str, int]:
    return {name: place for place, name in enumerate(_NAMES)}
