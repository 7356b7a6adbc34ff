"""Muon on sharded parameters: `optimizer` is the class, `newton_schulz` the matrix iteration."""

from fsdp.optim.muon.optimizer import Muon

__all__ = ["Muon"]
