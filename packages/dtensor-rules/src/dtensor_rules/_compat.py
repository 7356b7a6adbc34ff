"""What differs between the versions of torch that are supported, each with a canary test.

Importing this module checks that torch is the one that the extension module was compiled for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dtensor_rules._built_for import TORCH_VERSION


def minor(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.split(".")[:2])


def require_torch(built_for: str, found: str) -> None:
    """Refuses another minor version than the one compiled for: its C++ interfaces are others.

    Raises:
        ImportError: they differ.
    """
    if minor(built_for) != minor(found):
        raise ImportError(
            f"dtensor_rules was compiled for torch {minor(built_for)} and finds torch {found}. "
            f"Build it for this torch: pip install --no-build-isolation --force-reinstall "
            f"--no-deps dtensor-rules. Until then DTensor works as ever, without it."
        )


require_torch(TORCH_VERSION, torch.__version__)


def strategy_tables() -> list[dict[Any, Any]]:
    """The dicts that say which operators can be sharded; 2.11 has not all of them."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    names = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
    return [getattr(propagator, name) for name in names if hasattr(propagator, name)]


def schema_info(op: torch._ops.OpOverload) -> Any:
    """The `RuntimeSchemaInfo` registered for an operator, or None, as `unwrap_to_op_info` finds it."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op)
    if info is None:
        single = getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {})
        info = single.get(op)
    return info
