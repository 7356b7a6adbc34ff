"""Run by `nox -s wheels` where only ragged-shard and what it declares are installed: no pytest."""

import importlib.metadata
import importlib.resources
import sys

import ragged_shard
from ragged_shard.planner import TensorSpec, plan_layout

version = importlib.metadata.version("ragged-shard")
assert ragged_shard.__version__ == version, (
    f"{ragged_shard.__version__} imported, {version} installed"
)
assert importlib.resources.files(ragged_shard).joinpath("py.typed").is_file(), "py.typed is missing"

layout = plan_layout([TensorSpec("weight", 96, block=8), TensorSpec("bias", 12)], world_size=2)
assert layout.shard_size == 56, layout
assert layout.units(0) == (7, 5), layout.units(0)
assert "torch" not in sys.modules, "the planner loads torch"

placement = ragged_shard.RaggedShard((0,), layout.units(0))
assert placement.local_shape((12, 8), 0) == (7, 8)
print(f"ragged_shard {version}: imported from {ragged_shard.__file__}")
