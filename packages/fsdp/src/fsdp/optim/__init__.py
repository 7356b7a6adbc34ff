"""Optimizers for parameters that `fully_shard` has placed in buffers, by blocks or matrices."""

from fsdp.optim.adam8bit import Adam8bit
from fsdp.optim.adamw import AdamW
from fsdp.optim.muon import Muon
from fsdp.optim.soap import SOAP
from fsdp.optim.whole_matrices import WholeMatrices

__all__ = ["SOAP", "Adam8bit", "AdamW", "Muon", "WholeMatrices"]
