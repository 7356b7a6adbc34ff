"""Placements that torch's DTensor lacks, and the planner of their layouts.

Note: importing changes nothing in torch; `install` does, which the first construction of a
placement calls. The planner needs no torch, and importing `ragged_shard.planner` must not load it,
so the names below are loaded at first use.
"""

from __future__ import annotations

import importlib

from ragged_shard import patch_points

TYPE_CHECKING = False  # as typing has it, whose import costs the planner milliseconds
if TYPE_CHECKING:
    from ragged_shard.dtensor.checkpointable import from_checkpointable, to_checkpointable
    from ragged_shard.fallback import (
        RaggedShardFallbackWarning,
        fallbacks,
        reset_fallbacks,
        strict,
    )
    from ragged_shard.geometry.specs import dim_of, even_shape, largest_shape, local_shape
    from ragged_shard.interleaved import InterleavedShard
    from ragged_shard.patches import install, is_installed, uninstall
    from ragged_shard.ragged import RaggedShard
    from ragged_shard.strided import StridedRaggedShard
    from ragged_shard.visualization.ownership import Ownership, visualize

__version__ = "0.1.0"

__all__ = [
    "InterleavedShard",
    "Ownership",
    "RaggedShard",
    "RaggedShardFallbackWarning",
    "StridedRaggedShard",
    "dim_of",
    "even_shape",
    "fallbacks",
    "from_checkpointable",
    "install",
    "is_installed",
    "largest_shape",
    "local_shape",
    "reset_fallbacks",
    "strict",
    "to_checkpointable",
    "uninstall",
    "visualize",
]

_MODULES = {
    "InterleavedShard": "interleaved",
    "Ownership": "visualization.ownership",
    "RaggedShard": "ragged",
    "RaggedShardFallbackWarning": "fallback",
    "StridedRaggedShard": "strided",
    "dim_of": "geometry.specs",
    "even_shape": "geometry.specs",
    "fallbacks": "fallback",
    "from_checkpointable": "dtensor.checkpointable",
    "install": "patches",
    "is_installed": "patches",
    "largest_shape": "geometry.specs",
    "local_shape": "geometry.specs",
    "reset_fallbacks": "fallback",
    "strict": "fallback",
    "to_checkpointable": "dtensor.checkpointable",
    "uninstall": "patches",
    "visualize": "visualization.ownership",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'ragged_shard' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"ragged_shard.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


# The constructors of placements install the patches, which import the placements.
patch_points.installer = lambda: importlib.import_module("ragged_shard.patches").install()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
