"""What an entry of a plan does."""

from __future__ import annotations

import enum

__all__ = ["Verb"]


class Verb(enum.Enum):
    """The methods of a plan."""

    SHARD = "shard"
    REDISTRIBUTE = "redistribute"
    ANNOTATE = "annotate"
