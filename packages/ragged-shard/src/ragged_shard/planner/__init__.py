"""Plans where a group of tensors lies in one buffer of equal shards; needs no torch.

``python -m ragged_shard.planner --help`` shows the same on a command line.
"""

from ragged_shard.planner.balance import balance
from ragged_shard.planner.layout import Interval, Layout, Part
from ragged_shard.planner.solve import plan_layout
from ragged_shard.planner.spec import TensorSpec
from ragged_shard.planner.verify import verify

__all__ = ["Interval", "Layout", "Part", "TensorSpec", "balance", "plan_layout", "verify"]
