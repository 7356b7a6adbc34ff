"""One collective where DTensor makes hundreds."""

from fused_comm.reducer import GradReducer

__version__ = "0.1.0"

__all__ = ["GradReducer"]
