"""Context parallelism: sequences are sharded along a mesh axis, and attention is over all of them.

Note: the *order* says which *chunks* of a sequence each rank has: one, or two in zig-zag order. A
*block* is the keys and values of one rank. A *tile* is a range of a rank's queries and a range of
keys that they attend to, computed by one kernel call.
"""

from plan_api.context_parallel.order import AttentionTile, SequenceSharding

__all__ = ["AttentionTile", "SequenceSharding"]
