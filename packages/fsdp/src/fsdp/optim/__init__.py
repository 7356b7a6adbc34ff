"""Optimizers that use what sharding leaves whole: blocks of 8-bit moments, matrices."""

from fsdp.optim.adam8bit import Adam8bit
from fsdp.optim.muon import Muon
from fsdp.optim.whole import WholeMatrices

__all__ = ["Adam8bit", "Muon", "WholeMatrices"]
