"""Draws the random numbers of one device for any placement and any number of ranks.

``install()`` does so for random operators on DTensors; the functions that take a ``Region`` do it
for local tensors without DTensor. ``dist_rng.regions.region`` defines the terminology.
"""

from dist_rng.dtensor.agreement import require_equal_generators
from dist_rng.dtensor.patches import install, is_installed, uninstall
from dist_rng.functional import (
    bernoulli_,
    cauchy_,
    dropout,
    exponential_,
    geometric_,
    log_normal_,
    normal_,
    randint_,
    random_,
    scaled_dot_product_attention,
    trunc_normal_,
    uniform_,
)
from dist_rng.philox.geometry import Geometry
from dist_rng.regions.region import DrawRun, IndexRange, Region
from dist_rng.regions.registry import register_placement
from dist_rng.single_device import single_device_rng
from dist_rng.stream_position import skip, words_between

__version__ = "0.1.0"

__all__ = [
    "DrawRun",
    "Geometry",
    "IndexRange",
    "Region",
    "bernoulli_",
    "cauchy_",
    "dropout",
    "exponential_",
    "geometric_",
    "install",
    "is_installed",
    "log_normal_",
    "normal_",
    "randint_",
    "random_",
    "register_placement",
    "require_equal_generators",
    "scaled_dot_product_attention",
    "single_device_rng",
    "skip",
    "trunc_normal_",
    "uniform_",
    "uninstall",
    "words_between",
]
