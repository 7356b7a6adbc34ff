"""The registry of the functions that say which elements a placement leaves to a rank.

Note [placements of other packages]
    A package that defines a placement registers what it holds by calling ``register_placement``,
    or, so that neither package imports the other, by an entry point of the group
    ``dist_rng.placements``: its name is the class's ``module.qualname``, its value a function
    that takes ``register_placement`` and calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

# (region, placement, axis_size, axis_rank) -> region; the regions are dist_rng.Region's.
RegionFunction = Callable[[Any, Any, int, int], Any]
ENTRY_POINTS = "dist_rng.placements"


@dataclass(frozen=True, eq=False)  # by identity: registering again is a new key of caches
class RegisteredPlacement:
    """What ``register_placement`` stored for a class of placements."""

    function: RegionFunction
    last: bool


_registered: dict[type, RegisteredPlacement] = {}


def register_placement(placement: type, function: RegionFunction, *, last: bool = False) -> None:
    """Registers what a placement holds: ``function(region, placement, axis_size, axis_rank)``.

    Args:
        placement: the exact class; subclasses are registered separately.
        function: takes the ``Region`` that the mesh axes before this one leave to the rank, and
            returns the part that the placement leaves to it (see ``Region.select`` and
            ``Region.within``).
        last: whether it is applied after all other axes, whatever its position in the mesh; a
            placement whose function calls ``Region.within`` must be.
    """
    _registered[placement] = RegisteredPlacement(function, last)


def registered_placement(placement: Any) -> RegisteredPlacement:
    """Returns what is registered for a placement, looking for an entry point if need be.

    Raises:
        ValueError: nothing is registered for its class.
    """
    kind = type(placement)
    if kind not in _registered:
        name = f"{kind.__module__}.{kind.__qualname__}"
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            entry.load()(register_placement)
    if kind not in _registered:
        raise ValueError(
            f"expected a placement that is registered with dist-rng, got {placement}; call"
            f" dist_rng.register_placement({kind.__qualname__}, function) first"
        )
    return _registered[kind]
