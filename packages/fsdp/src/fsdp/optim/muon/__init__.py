"""Muon on sharded parameters; `optimizer` begins the story, `matrices` has its words."""

from fsdp.optim.muon.optimizer import Muon

__all__ = ["Muon"]
