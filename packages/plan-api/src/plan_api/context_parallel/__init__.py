"""Context parallelism: a sequence cut along an axis of the mesh, and attention over all of it.

Note: the *order* says which *chunks* of a sequence each rank has: one, or in zig-zag order two. A
*block* is the keys and values of one rank. A *piece* is a part of the queries of a rank against a
part of the keys that it sees, all of one kernel call.
"""

from plan_api.context_parallel.order import Order, Piece

__all__ = ["Order", "Piece"]
