"""SOAP on sharded parameters; `optimizer` begins the story, `eigenbasis` has the formulas."""

from fsdp.optim.soap.optimizer import SOAP

__all__ = ["SOAP"]
