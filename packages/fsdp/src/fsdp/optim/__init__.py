"""Optimizers for parameters whose blocks or matrices `fully_shard` keeps on one rank."""

from fsdp.optim.adam8bit import Adam8bit
from fsdp.optim.muon import Muon
from fsdp.optim.soap import SOAP
from fsdp.optim.whole_matrices import WholeMatrices

__all__ = ["SOAP", "Adam8bit", "Muon", "WholeMatrices"]
