"""The packages and what they depend on, from the metadata of their distributions."""

import re
from dataclasses import dataclass
from importlib.metadata import requires

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from integration.gallery.picture import Picture, as_png, gallery_figure
from integration.report.palette import LIGHT

_DISTRIBUTIONS = {"integration": "spmd-integration"}
_SIZE = (0.96, 0.5)


@dataclass(frozen=True)
class Box:
    """A package in the picture: what it does, and the centre of its box."""

    purpose: str
    x: float
    y: float


PACKAGES = {
    "integration": Box("models, trainer, comparisons", 1.6, 4.0),
    "plan-api": Box("parallelism in one plan", 2.6, 3.0),
    "fsdp": Box("fully_shard without copies", 0.6, 3.0),
    "dbuffer": Box("a group in one buffer", 0.0, 2.0),
    "ragged-shard": Box("placements, layout planner", 0.0, 1.0),
    "fused-comm": Box("one collective per bucket", 1.05, 1.0),
    "dtensor-rules": Box("dispatch in C++", 2.1, 1.0),
    "dist-rng": Box("one device's numbers", 3.15, 1.0),
    "torch": Box("DTensor, DeviceMesh, autograd", 1.6, 0.0),
}


@dataclass(frozen=True)
class Edge:
    """A dependency.

    Attributes:
        is_extra: whether the package works without it.
    """

    source: str
    target: str
    is_extra: bool


def edges() -> list[Edge]:
    """Returns the dependencies between packages; that on torch only where there is no other."""
    found: list[Edge] = []
    for source in PACKAGES:
        if source == "torch":
            continue
        own: dict[str, bool] = {}
        for requirement in requires(_DISTRIBUTIONS.get(source, source)) or ():
            match = re.match(r"[\w-]+", requirement)
            target = match[0] if match else ""
            if target in PACKAGES and target != source:
                own[target] = own.get(target, True) and "extra ==" in requirement
        others = {target: extra for target, extra in own.items() if target != "torch"}
        if source == "integration":  # it uses all packages
            others = {target: others[target] for target in ("plan-api", "fsdp")}
        shown = others if any(not extra for extra in others.values()) else others or own
        found += [Edge(source, target, extra) for target, extra in shown.items()]
    return found


def draw() -> bytes:
    """Draws the packages as boxes, users above what they use."""
    figure = gallery_figure(5.2)
    axes = figure.subplots()
    for edge in edges():
        source, target = PACKAGES[edge.source], PACKAGES[edge.target]
        rise = 0 if source.y == target.y else _SIZE[1] / 2
        start, end = (source.x, source.y - rise), (target.x, target.y + rise)
        axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=11,
                shrinkA=0,
                shrinkB=1,
                color=LIGHT.muted,
                linewidth=1.1,
                linestyle=(0, (3, 2)) if edge.is_extra else "-",
                zorder=1,
            )
        )
    for name, box in PACKAGES.items():
        colour = LIGHT.muted if name == "torch" else LIGHT.series[0]
        axes.add_patch(
            FancyBboxPatch(
                (box.x - _SIZE[0] / 2 + 0.04, box.y - _SIZE[1] / 2 + 0.04),
                _SIZE[0] - 0.08,
                _SIZE[1] - 0.08,
                boxstyle="round,pad=0.04",
                facecolor=LIGHT.background,
                edgecolor=colour,
                zorder=2,
            )
        )
        axes.text(box.x, box.y + 0.08, name, ha="center", va="center", fontsize=10,
                  fontweight="bold", color=LIGHT.ink, zorder=3)  # fmt: skip
        axes.text(box.x, box.y - 0.11, box.purpose, ha="center", va="center", fontsize=6.6,
                  color=LIGHT.muted, zorder=3)  # fmt: skip
    axes.set(xlim=(-0.55, 3.7), ylim=(-0.35, 4.35))
    axes.axis("off")
    return as_png(figure)


PICTURE = Picture("architecture.png", draw)
