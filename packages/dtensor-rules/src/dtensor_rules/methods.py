"""`DTensor.redistribute`, `from_local` and `to_local` while the library is on.

Note: each of torch's methods gets a function in front that asks C++ first (methods.h). C++ answers
with the result; or with None, where the call is torch's; or with NotImplemented, where it is
torch's this once, and what torch makes of it is remembered. So torch itself checks the arguments,
raises its errors, and says what a call means.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._api import _FromTorchTensor, _ToTorchTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import Redistribute

from dtensor_rules import _compat, _core
from dtensor_rules.redistribution import plan_redistribution

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Puts the fast methods in front of torch's."""
    _core.set_backwards(
        redistribute=_redistribute_backward,
        from_local=_from_local_backward,
        to_local=_to_local_backward,
    )
    _core.set_methods_on(True)
    _undo.append(lambda: _core.set_methods_on(False))
    _replace("redistribute", _redistribute(DTensor.redistribute))
    _replace("from_local", staticmethod(_from_local(DTensor.from_local)))
    _replace("to_local", _to_local(DTensor.to_local))


def remove() -> None:
    """Gives torch its methods back."""
    while _undo:
        _undo.pop()()


def _replace(name: str, method: object) -> None:
    native = vars(DTensor)[name]
    setattr(DTensor, name, method)
    _undo.append(lambda: setattr(DTensor, name, native))


def _redistribute(native: Callable[..., DTensor]) -> Callable[..., DTensor]:
    fast = _core.redistribute

    @functools.wraps(native)
    def redistribute(
        self: DTensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        result = None
        if not (async_op or forward_dtype or backward_dtype or is_dynamo_compiling()):
            result = fast(self, device_mesh, placements)
            if result is not None and result is not NotImplemented:
                return result  # type: ignore[no-any-return]
        own = native(
            self,
            device_mesh,
            placements,
            async_op=async_op,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )
        if result is NotImplemented:
            plan = plan_redistribution(self._spec, own._spec)
            _core.learn_redistribute(self, placements, own._spec if plan else None, plan)
        return own

    return redistribute


def _from_local(native: Callable[..., DTensor]) -> Callable[..., DTensor]:
    fast = _core.from_local

    @functools.wraps(native)
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: torch.Size | None = None,
        stride: tuple[int, ...] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        result = None
        if not (run_check or grad_placements is not None or is_dynamo_compiling()):
            result = fast(local_tensor, device_mesh, placements, shape, stride)
            if result is not None and result is not NotImplemented:
                return result  # type: ignore[no-any-return]
        own = native(
            local_tensor,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            stride=stride,
            **_compat.gradient_argument(grad_placements),
        )
        if result is NotImplemented:
            # Where torch moved it to another device, or made an empty one of it, it is torch's.
            plain = _is_around(own, local_tensor)
            spec = own._spec if plain else None
            _core.learn_from_local(local_tensor, device_mesh, placements, shape, stride, spec)
        return own

    return from_local


def _to_local(native: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    fast = _core.to_local

    @functools.wraps(native)
    def to_local(
        self: DTensor, *, grad_placements: Sequence[Placement] | None = None
    ) -> torch.Tensor:
        if grad_placements is None and not is_dynamo_compiling():
            result = fast(self)
            if result is not None:
                return result  # type: ignore[no-any-return]
        return native(self, grad_placements=grad_placements)

    return to_local


def _is_around(dtensor: DTensor, local: torch.Tensor) -> bool:
    """Whether the DTensor is torch's own, in this rank's mesh, around this memory."""
    own = dtensor._local_tensor
    return (
        type(dtensor) is DTensor
        and dtensor._spec.mesh.get_coordinate() is not None
        and own.device == local.device
        and own.shape == local.shape
    )


# What C++ asks when a gradient comes: (result, what the key means from now on or None), the meaning
# as (spec or None, transform or None). The contexts are what torch's forwards leave behind.


def _redistribute_backward(
    grad: Any, spec: DTensorSpec, dtype: torch.dtype, stride: tuple[int, ...]
) -> tuple[object, object]:
    result = Redistribute.backward(_compat.redistribute_context(spec, dtype), grad)[0]
    if torch.is_grad_enabled() or type(grad) is not DTensor:
        return result, None
    plan = plan_redistribution(grad._spec, result._spec)
    return result, (result._spec if plan else None, plan)


def _from_local_backward(
    grad: Any, spec: DTensorSpec, dtype: torch.dtype, stride: tuple[int, ...]
) -> tuple[object, object]:
    context = types.SimpleNamespace(
        forward_input_placements=spec.placements,
        forward_input_device_mesh=spec.mesh,
        grad_placements=None,
    )
    result = _FromTorchTensor.backward(context, grad)[0]
    wanted = _compat.gradient_placements(spec.placements)
    if torch.is_grad_enabled() or type(grad) is not DTensor:
        return result, None
    given = grad._spec
    if given.placements == wanted:
        return result, (given, None)
    plan = plan_redistribution(given, DTensorSpec(spec.mesh, wanted, tensor_meta=given.tensor_meta))
    return result, (given if plan else None, plan)


def _to_local_backward(
    grad: torch.Tensor, spec: DTensorSpec, dtype: torch.dtype, stride: tuple[int, ...]
) -> tuple[object, object]:
    result = _ToTorchTensor.backward(_compat.to_local_context(spec, stride), grad)[0]
    if torch.is_grad_enabled() or type(result) is not DTensor:
        return result, None
    return result, (result._spec if _is_around(result, grad) else None, None)
