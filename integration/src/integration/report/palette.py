"""Colours and markers of the systems, distinguishable without colour vision too."""

from collections.abc import Sequence
from dataclasses import dataclass

from integration.compare.results import SystemResult, Verdict

# Their number is coprime to that of the colours, so that no two systems share both.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")


@dataclass(frozen=True)
class Theme:
    """The colours of one background.

    Attributes:
        reference: colour of the reference's curve and bars.
        series: colours of the other systems, in turn.
    """

    ink: str
    muted: str
    grid: str
    background: str
    reference: str
    series: tuple[str, ...]


# The series are Okabe and Ito's colours (https://jfly.uni-koeln.de/color), on dark lightened.
LIGHT = Theme(
    ink="#1c2024",
    muted="#5d666f",
    grid="#e3e6e9",
    background="#ffffff",
    reference="#a7b0ba",
    series=("#0072b2", "#d55e00", "#009e73", "#b5548c", "#c98500", "#3f9fd6", "#7d6b5d"),
)
DARK = Theme(
    ink="#e8eaed",
    muted="#a0a8b0",
    grid="#32383f",
    background="#1a1d21",
    reference="#6f7a85",
    series=("#56b4e9", "#f08040", "#2cc99b", "#e39ac4", "#f0c040", "#8fd0f5", "#bfa894"),
)


@dataclass(frozen=True)
class Style:
    """The colour and marker of one system."""

    colour: str
    marker: str


def styles(results: Sequence[SystemResult], theme: Theme) -> dict[str, Style]:
    """Returns the style of every system by name; the first is the reference."""
    reference, *others = dict.fromkeys(result.system for result in results)
    drawn = {reference: Style(theme.reference, "")}
    for index, system in enumerate(others):
        colour = theme.series[index % len(theme.series)]
        drawn[system] = Style(colour, MARKERS[index % len(MARKERS)])
    return drawn


def label(result: SystemResult) -> str:
    """Returns a system's label in a figure."""
    return f"{result.system} (failed)" if result.verdict is Verdict.FAILED else result.system
