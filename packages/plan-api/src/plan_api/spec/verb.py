"""What an entry of a plan does."""

from __future__ import annotations

import enum

__all__ = ["Verb"]


class Verb(enum.Enum):
    """The methods of a plan."""

    SHARD = "shard"
    REDISTRIBUTE = "redistribute"
    ANNOTATE = "annotate"
    FACTORY = "factory"
    LOCAL = "local"
    INDEX = "index"
    DISPATCH = "dispatch"
    FULLY_SHARD = "fully_shard"
    EAGER = "eager"
    CONTEXT = "context"
    SEQUENCE = "sequence"

    @property
    def of_modules(self) -> bool:
        """Whether its path names modules, and not tensors."""
        modules = (Verb.FACTORY, Verb.LOCAL, Verb.FULLY_SHARD, Verb.EAGER, Verb.CONTEXT)
        return self in modules
