"""Context parallelism: sequences are sharded along a mesh axis, and attention is over all of them.

Note: the *mask* says which keys each query attends to; the *order*, which positions of the sequence
each rank has, ascending. A *block* is the queries of one rank and the keys of another. A *tile* is
a range of a block's queries and a range of its keys, computed by one kernel call.
"""

from plan_api.context_parallel.call import AttentionCall
from plan_api.context_parallel.mask import AttentionMask
from plan_api.context_parallel.order import SequenceSharding, TokenOrder
from plan_api.context_parallel.tiles import AttentionTile

__all__ = ["AttentionCall", "AttentionMask", "AttentionTile", "SequenceSharding", "TokenOrder"]
