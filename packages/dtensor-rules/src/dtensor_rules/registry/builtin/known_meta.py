"""Torch's propagation without its dearest step, for results whose shape is known already."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator

Meta = TensorMeta | Sequence[TensorMeta | None] | None


class _KnownMeta(ShardingPropagator):
    """Torch's propagator, all its tables included, that does not run the operator on fake tensors.

    Source: `_propagate_tensor_meta_non_cached` in torch/distributed/tensor/_sharding_prop.py.
    """

    def __init__(self, meta: Meta) -> None:
        # The tables are shared, not copied: this is torch's own propagator in all but one step.
        self.__dict__ = dict(DTensor._op_dispatcher.sharding_propagator.__dict__)
        self._known = meta

    def _propagate_tensor_meta_non_cached(self, op_schema: OpSchema) -> Meta:
        return self._known


def propagate(schema: OpSchema, meta: Meta) -> OutputSharding:
    """Returns torch's decision about a call, given the shapes of the results.

    Args:
        schema: the operator and the specs of its arguments.
        meta: global shape, stride and dtype of the result, or of each; None for no tensor.

    Raises:
        Exception: whatever torch's propagation raises.
    """
    return _KnownMeta(meta).propagate_op_sharding_non_cached(schema)
