"""Optimizers that want more of a sharding than torch's do."""

from fsdp.optim.adam8bit import Adam8bit

__all__ = ["Adam8bit"]
