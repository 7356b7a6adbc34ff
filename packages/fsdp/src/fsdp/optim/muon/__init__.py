"""Muon on sharded parameters.

`optimizer` is the class, `newton_schulz` the matrix iteration, `compiled` the same by
torch.compile, and `normuon` the normalization of rows.
"""

from fsdp.optim.muon.optimizer import Muon

__all__ = ["Muon"]
