"""AdamW with block-wise 8-bit moments.

`optimizer` is the public class, `quantization` defines the codes and `state` the placement of
blocks. `step` prepares the local update of each parameter, and `update` computes it: in torch
operators, and on the CPU in C++ with the same bits.
"""

from fsdp.optim.adam8bit.optimizer import Adam8bit

__all__ = ["Adam8bit"]
