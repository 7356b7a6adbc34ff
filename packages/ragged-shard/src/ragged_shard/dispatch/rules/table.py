"""The table of rules of operators with ragged inputs."""

from __future__ import annotations

import torch

from ragged_shard.dispatch.operator_call import AxisRule, OperatorCall
from ragged_shard.dispatch.rules.elementwise import foreach, masked_put, pointwise
from ragged_shard.dispatch.rules.matmul import batched, dot, product, product_added
from ragged_shard.dispatch.rules.reduction import along_unsharded_dim, foreach_reduction, reduction
from ragged_shard.dispatch.rules.views import expand, like, new, squeeze, unsqueeze, view
from ragged_shard.random_regions import INITIALIZERS, LIKE

#: By name, for all overloads. Operators that torch tags as pointwise need no entry.
_RULES: dict[str, AxisRule] = {
    "_foreach_max": foreach_reduction("max"),
    "_foreach_norm": foreach_reduction("norm"),
    "_log_softmax": along_unsharded_dim,
    "_softmax": along_unsharded_dim,
    "_to_copy": like,
    "_unsafe_view": view,
    "addmm": product_added,
    "addmv": product_added,
    "alias": like,
    "amax": reduction("max"),
    "amin": reduction("min"),
    "baddbmm": batched,
    "bmm": batched,
    "clone": like,
    "contiguous": like,
    "copy_": pointwise,
    "cumprod": along_unsharded_dim,
    "cumsum": along_unsharded_dim,
    "detach": like,
    "dot": dot,
    "empty_like": like,
    "equal": pointwise,
    "expand": expand,
    "fill_": pointwise,
    "full_like": like,
    "index_put_": masked_put,
    "lift_fresh": like,
    "linalg_vector_norm": reduction("norm"),
    "masked_fill": pointwise,
    "masked_fill_": pointwise,
    "mean": reduction("mean"),
    "mm": product,
    "mv": product,
    "new_empty": new,
    "new_empty_strided": new,
    "new_full": new,
    "new_ones": new,
    "new_zeros": new,
    "norm": reduction("norm"),
    "ones_like": like,
    "prod": reduction("product"),
    **dict.fromkeys(INITIALIZERS, pointwise),
    **dict.fromkeys(LIKE, like),
    "reshape": view,
    "sort": along_unsharded_dim,
    "squeeze": squeeze,
    "sum": reduction("sum"),
    "topk": along_unsharded_dim,
    "unsqueeze": unsqueeze,
    "vdot": dot,
    "view": view,
    "where": pointwise,
    "zero_": pointwise,
    "zeros_like": like,
}
#: By overload, where overloads have different rules.
_OVERLOADS: dict[str, AxisRule] = {
    "aten.max.default": reduction("max"),
    "aten.max.dim": along_unsharded_dim,
    "aten.min.default": reduction("min"),
    "aten.min.dim": along_unsharded_dim,
}


def rule_for(call: OperatorCall) -> AxisRule | None:
    """Returns the rule of an operator, or None."""
    op = call.op
    if op.namespace != "aten":
        return None
    name = op._schema.name.removeprefix("aten::")
    found = _OVERLOADS.get(str(op)) or _RULES.get(name)
    if found is not None:
        return found
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return foreach
    if torch.Tag.pointwise in op.tags:
        return pointwise
    return None
