"""`<*, out-given, *, *>`: the tensor that is written says what the result is."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from dtensor_rules.plan import Plan
from dtensor_rules.planning.planner import from_sharding
from dtensor_rules.registry.builtin.known_meta import Meta, propagate
from dtensor_rules.registry.call import Call
from dtensor_rules.registry.rule import Rule


def out_given(call: Call) -> Plan | None:
    """Takes placements from torch's decision, and shape and dtype from the written tensor.

    Source: veScale, section 6.1. Torch would run the operator on fake tensors to learn them.
    """
    if torch.Tag.inplace_view in call.op.tags:
        return None  # changes the shape of what it writes
    if not call.op._schema.returns:
        return _plan(call, None)  # `_foreach_add_`, `_fused_adamw_`: nothing is returned
    written = _written(call)
    # An empty `out` is resized to whatever the result is.
    if written is None or any(tensor.numel() == 0 for tensor in written):
        return None
    metas = tuple(_meta(tensor) for tensor in written)
    return _plan(call, metas[0] if len(metas) == 1 else metas)


def _plan(call: Call, meta: Meta) -> Plan | None:
    assert call.info.schema is not None
    try:
        sharding = propagate(call.info.schema, meta)
    except Exception:
        return None  # torch meets it as well, and words it for its users
    return from_sharding(call, sharding)


def _written(call: Call) -> list[DTensor] | None:
    """Returns the tensors that the operator writes and returns, if all are DTensors."""
    outs = [argument.name for argument in call.op._schema.arguments if argument.is_out]
    tensors = [call.kwargs[name] for name in outs] if outs else [call.args[0]]
    if not all(isinstance(tensor, DTensor) for tensor in tensors):
        return None
    return tensors  # type: ignore[return-value]


def _meta(tensor: DTensor) -> TensorMeta:
    meta = tensor._spec.tensor_meta
    assert meta is not None
    return TensorMeta(shape=meta.shape, stride=meta.stride, dtype=meta.dtype)


OUT_GIVEN = Rule("*", out_given, kind="out-given", numbers=False, name="out-given")
