"""Optimizers that use what sharding leaves whole."""

from fsdp.optim.muon import Muon

__all__ = ["Muon"]
