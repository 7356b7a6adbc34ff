"""Guards torch's special handlers of operators (argmax, convolution) against ragged inputs.

The handlers run before sharding propagation and silently treat an unknown placement as Replicate.
For a placement of this package the guard applies the operator's rule; without a rule it gathers the
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils import _pytree as pytree

from ragged_shard.dispatch.operator_call import OperatorCall
from ragged_shard.dispatch.rules import table
from ragged_shard.fallback import GatheredSpec, record_fallback
from ragged_shard.geometry.specs import any_custom, is_custom

#: Handlers that are correct for every placement: they read the local tensor, or test for Replicate.
_SAFE = {
    "is_same_size_handler",
    "is_pinned_handler",
    "as_strided_handler",
    "found_inf_reduce_handler",
}
Handler = Callable[[torch._ops.OpOverload, tuple[object, ...], dict[str, object]], object]


def guarded(
    handlers: Mapping[torch._ops.OpOverload, Handler],
) -> dict[torch._ops.OpOverload, Handler]:
    """Returns a guard for each of torch's handlers that needs one, by operator.

    Args:
        handlers: of the dispatcher, by operator; handlers of other packages do not get a guard.
    """
    return {
        op: _guarded(handler)
        for op, handler in handlers.items()
        if handler.__module__.startswith("torch.") and handler.__name__ not in _SAFE
    }


def _guarded(handler: Handler) -> Handler:
    def guarded(
        op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if not any(
            isinstance(leaf, DTensor) and _has_custom(leaf) for leaf in _leaves(args, kwargs)
        ):
            return handler(op, args, kwargs)
        result = _result_by_rule(op, args, kwargs)
        if result is not None:
            return result
        args, kwargs = pytree.tree_map_only(
            DTensor, lambda tensor: _replicated(op, tensor), (args, kwargs)
        )
        return handler(op, args, kwargs)

    return guarded


def _result_by_rule(
    op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> object | None:
    """Returns the result if the operator has a rule that redistributes no input; else None."""
    if table.rule_for(OperatorCall(OpSchema(op, (), {}))) is None:
        return None
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    propagate: Any = dispatcher.sharding_propagator.propagate_op_sharding
    sharding = propagate(info.schema)
    if sharding.needs_redistribute:
        return None
    return dispatcher.wrap(op(*info.local_args, **info.local_kwargs), sharding.output_spec)


def _leaves(*trees: object) -> list[Any]:
    return pytree.tree_leaves(trees)


def _has_custom(tensor: DTensor) -> bool:
    return any_custom(tensor._spec.placements)


def _replicated(op: torch._ops.OpOverload, tensor: DTensor) -> DTensor:
    spec = tensor._spec
    if not _has_custom(tensor):
        return tensor
    placements = tuple(Replicate() if is_custom(p) else p for p in spec.placements)
    record_fallback(GatheredSpec.of(spec, placements, str(op)), spec)
    with torch.no_grad():
        return tensor.redistribute(placements=placements)
