"""``fully_shard`` without copies."""

__version__ = "0.1.0"
