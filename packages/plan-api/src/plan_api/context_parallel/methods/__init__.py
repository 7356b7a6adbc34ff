"""Methods of attention over a sharded sequence, on local tensors."""

from plan_api.context_parallel.methods.all_gather import all_gather_attention
from plan_api.context_parallel.methods.ring import ring_attention
from plan_api.context_parallel.methods.ulysses import ulysses_attention

__all__ = ["all_gather_attention", "ring_attention", "ulysses_attention"]
