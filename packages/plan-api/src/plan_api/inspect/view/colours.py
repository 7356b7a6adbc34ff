"""The colours of placements, in which the text on them is dark on every screen.

Okabe and Ito's, which the colour-blind tell apart.
"""

from __future__ import annotations

__all__ = ["DIMS", "colour_of"]

_WHOLE, _PARTIAL, _OTHER = "#D6DADF", "#E8743B", "#4FC3A1"
DIMS = ("#56B4E9", "#E69F00", "#F0E442", "#CC79A7")  # of Shard(0), Shard(1) and so on


def colour_of(placement: str) -> str:
    """That of a placement, given as `plan_api.lowering.ir.short` writes it."""
    if placement == "R":
        return _WHOLE
    if placement == "P" or placement.startswith("P("):
        return _PARTIAL
    dim = placement.removeprefix("S(").removesuffix(")")
    return DIMS[int(dim) % len(DIMS)] if dim.isdecimal() else _OTHER
