"""AdamW with 8-bit moments; `optimizer` begins the story, `quantize` has the code books."""

from fsdp.optim.adam8bit.optimizer import Adam8bit

__all__ = ["Adam8bit"]
