"""The random numbers one device would have drawn, on any placement and any number of ranks.

``install()`` makes random operators on DTensors draw so; the functions that take a ``Region``
do the same for local tensors without DTensor. The words are defined in ``dist_rng.region``.
"""

from dist_rng.agreement import require_equal_generators
from dist_rng.functional import (
    bernoulli_,
    dropout,
    exponential_,
    normal_,
    randint_,
    random_,
    uniform_,
)
from dist_rng.geometry import Geometry
from dist_rng.install import install, is_installed, uninstall
from dist_rng.placement import register_placement
from dist_rng.region import Piece, Region, Run
from dist_rng.single_device import single_device_rng
from dist_rng.truncated import trunc_normal_

__version__ = "0.1.0"

__all__ = [
    "Geometry",
    "Piece",
    "Region",
    "Run",
    "bernoulli_",
    "dropout",
    "exponential_",
    "install",
    "is_installed",
    "normal_",
    "randint_",
    "random_",
    "register_placement",
    "require_equal_generators",
    "single_device_rng",
    "trunc_normal_",
    "uniform_",
    "uninstall",
]
