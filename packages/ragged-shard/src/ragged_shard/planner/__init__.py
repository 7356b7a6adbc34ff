"""Plans where the tensors of a group are placed in one buffer of equal shards, without torch.

``python -m ragged_shard.planner --help`` describes the command line.
"""

from ragged_shard.planner.balance import balance
from ragged_shard.planner.buffer import Interval, TensorSlice
from ragged_shard.planner.layout import Layout, verify
from ragged_shard.planner.plan import plan_layout
from ragged_shard.planner.spec import TensorSpec

__all__ = ["Interval", "Layout", "TensorSlice", "TensorSpec", "balance", "plan_layout", "verify"]
