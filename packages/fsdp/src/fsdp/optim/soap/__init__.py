"""SOAP on sharded parameters.

`optimizer` is the class, `eigenbasis` the algorithm for one block, and `blocks` how matrices are
divided into blocks and how the state of blocks is placed.
"""

from fsdp.optim.soap.optimizer import SOAP

__all__ = ["SOAP"]
