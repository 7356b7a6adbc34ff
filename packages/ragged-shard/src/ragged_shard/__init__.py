"""Placements that stock DTensor lacks, and the planner of their layouts.

Note: importing a placement installs the package in torch (install.py). The planner needs no torch,
and importing `ragged_shard.planner` must not load it, so the names below are loaded at first use,
or at once where torch is loaded already.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # as typing has it, whose import costs the planner milliseconds
if TYPE_CHECKING:
    from ragged_shard.fallback import (
        RaggedShardFallbackWarning,
        fallbacks,
        reset_fallbacks,
        strict,
    )
    from ragged_shard.interleaved import InterleavedShard
    from ragged_shard.ownership import Ownership
    from ragged_shard.ragged import RaggedShard
    from ragged_shard.spec import dim_of, even_shape, local_shape
    from ragged_shard.strided import StridedRaggedShard
    from ragged_shard.visualization import visualize

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
    "local_shape",
    "reset_fallbacks",
    "strict",
    "visualize",
]

_HOMES = {
    "InterleavedShard": "interleaved",
    "Ownership": "ownership",
    "RaggedShard": "ragged",
    "RaggedShardFallbackWarning": "fallback",
    "StridedRaggedShard": "strided",
    "dim_of": "spec",
    "even_shape": "spec",
    "fallbacks": "fallback",
    "local_shape": "spec",
    "reset_fallbacks": "fallback",
    "strict": "fallback",
    "visualize": "visualization",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ragged_shard' has no attribute {name!r}")
    _load()
    return globals()[name]


def _load() -> None:
    """Imports every name into this module, and installs the seams."""
    importlib.import_module("ragged_shard.install").install()
    for name, home in _HOMES.items():
        globals()[name] = getattr(importlib.import_module(f"ragged_shard.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:
    _load()
