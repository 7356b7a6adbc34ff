"""Caches what torch infers of results' shapes, strides and dtypes, and what it infers them by.

Note: for every new call torch's propagation runs the operator once on fake tensors, whatever their
placements are: most of the time that a decision takes. The result is cached for calls that differ
in placements alone. Views, and a few operators more, are run on meta tensors instead, which takes a
tenth of the time, and gives what fake tensors give. For others torch would make a `FakeTensorMode`,
which formats a stack trace, and a fake tensor for each argument; these are the same for all calls
of a thread: one mode, and one tensor for each shape, stride, dtype and device. An operator may
change the shape of its argument in place, so a tensor is checked before it is used again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._pytree import tree_map_only

#: Fake tensors that are cached per thread, and results that are cached per process.
_MOST_TENSORS, _MOST_RESULTS = 512, 4096

#: Values that are equal only if they are the same to an operator, given their type.
_PLAIN = (
    int, float, bool, complex, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

#: Operators that are no views, but whose results are inferred in C++, alike for all devices.
_NATIVE = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.mm.default,
    }
)

_Infer = Callable[[OpSchema], object]
_Rebuild = Callable[[DTensorSpec], object]


class _Thread(threading.local):
    """The fake mode and the fake tensors of one thread."""

    def __init__(self) -> None:
        self.mode: FakeTensorMode | None = None
        self.tensors: OrderedDict[tuple[Any, str], torch.Tensor] = OrderedDict()


_thread = _Thread()


def mode() -> FakeTensorMode:
    """Returns the fake mode of this thread."""
    if _thread.mode is None:
        _thread.mode = FakeTensorMode()
        # The results are cached here: torch's own cache would cost as much as the inference.
        _thread.mode.cache_enabled = False
    return _thread.mode


_results: OrderedDict[Hashable, object] = OrderedDict()


def clear() -> None:
    """Drops the results, and the mode and the tensors of the calling thread."""
    _results.clear()
    _thread.mode = None
    _thread.tensors.clear()


def infer_with(native: _Infer) -> _Infer:
    """Returns a function that infers the results of a call, once for all placements.

    Args:
        native: torch's, `_propagate_tensor_meta_non_cached` of the propagator, which runs the
            operator on fake tensors; it answers where sizes are symbols.
    """

    def infer(schema: OpSchema) -> object:
        try:
            arguments = _key((schema.args_schema, schema.kwargs_schema))
        except _NoKeyError:
            return native(schema)
        key = (schema.op, torch.get_default_dtype(), arguments)
        if key in _results:
            _results.move_to_end(key)
        else:
            _results[key] = _on_meta(schema) if _runs_on_meta(schema.op) else native(schema)
            if len(_results) > _MOST_RESULTS:
                _results.popitem(last=False)
        return _results[key]

    return infer


def _runs_on_meta(op: torch._ops.OpOverload) -> bool:
    # A mode, as of a compiler, would see the meta tensors and record them.
    return (op.is_view or op in _NATIVE) and torch._C._len_torch_dispatch_stack() == 0


def _on_meta(schema: OpSchema) -> object:
    """Infers the results of a call on meta tensors, as torch's function describes them."""

    def empty(spec: DTensorSpec) -> torch.Tensor:
        assert spec.tensor_meta is not None
        shape, stride, dtype = spec.tensor_meta
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    arguments = (schema.args_schema, schema.kwargs_schema)
    args, kwargs = tree_map_only(DTensorSpec, empty, arguments)
    result = schema.op(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return _described(result)
    return type(result)(map(_described, result))


def _described(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


class _NoKeyError(Exception):
    """Raised for an argument that cannot be compared with that of another call."""


def _key(value: object) -> Hashable:
    if type(value) is DTensorSpec:
        meta = value.tensor_meta
        if meta is None or any(type(size) is not int for size in (*meta.shape, *meta.stride)):
            raise _NoKeyError
        return meta, value.mesh.device_type
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    if type(value) not in _PLAIN:
        raise _NoKeyError
    return type(value), value


def rebuild_with(native: _Rebuild) -> _Rebuild:
    """Returns a function that gives the fake tensor of a spec.

    Args:
        native: torch's, `_rebuild_tensor_from_dtensor_meta`, which makes one; it answers under
            another fake mode, such as that of a compiler.
    """

    def rebuild(spec: DTensorSpec) -> object:
        active: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if active is None or active is not _thread.mode or spec.tensor_meta is None:
            return native(spec)
        meta, tensors = spec.tensor_meta, _thread.tensors
        key = (meta, spec.mesh.device_type)
        tensor = tensors.get(key)
        if tensor is not None and tensor.shape == meta.shape and tensor.stride() == meta.stride:
            tensors.move_to_end(key)
            return tensor
        made = native(spec)
        assert isinstance(made, torch.Tensor)
        tensors[key] = made
        if len(tensors) > _MOST_TENSORS:
            tensors.popitem(last=False)
        return made

    return rebuild
