"""Places the tensors that a module's forward creates, as by `torch.zeros`.

In Eager they become DTensors: otherwise they are plain, and torch refuses operators on a plain
tensor and a DTensor (veScale, appendix 12). In static mode each rank takes its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from plan_api.runtime.hooks import register_always_called
from plan_api.spec.axes import axis_names

__all__ = ["LIKE_TENSORS", "CreateTensor", "install_creation", "install_factory"]

# Calls a function that creates a tensor, with its arguments, and returns the placed tensor.
CreateTensor: TypeAlias = Callable[
    [Callable[..., Any], Sequence[Any], Mapping[str, Any]], torch.Tensor
]

# Functions that create a tensor from numbers. A tensor created like a DTensor is one; of other
# sizes than that, torch replicates it.
_FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "normal", "ones",
        "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices",
        "triu_indices", "zeros",
    )
)  # fmt: skip
LIKE_TENSORS = frozenset(
    getattr(torch.Tensor, name) for name in ("new_empty", "new_full", "new_ones", "new_zeros")
)
_PLACED = _FACTORIES | LIKE_TENSORS

# Whether the entry of an inner module places the tensor that is being created.
_is_decided: ContextVar[bool] = ContextVar("_is_decided", default=False)


def install_factory(
    module: nn.Module, placements: Mapping[str, Placement], mesh: DeviceMesh
) -> list[RemovableHandle]:
    """Makes the tensors that a module's forward creates DTensors, in nested calls too.

    Where modules with an entry are nested, the entry of the innermost applies.

    Args:
        module: any.
        placements: by axis; along others tensors are replicated, as are those without the dim of a
            shard.
        mesh: of the plan.
    """
    placed = [placements.get(axis, Replicate()) for axis in axis_names(mesh)]

    def create(
        function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        created: torch.Tensor = function(*args, **kwargs)
        if isinstance(created, DTensor):
            replicated = created
        elif (
            type(created) is not torch.Tensor
            or created.device.type != mesh.device_type
            or function in LIKE_TENSORS  # of a plain tensor, which the plan does not place
        ):
            return created
        else:
            # Created whole, so that random numbers are those of one device; each rank takes its
            # shard.
            whole = [Replicate()] * mesh.ndim
            replicated = DTensor.from_local(created, mesh, whole, run_check=False)
        target = [
            p if getattr(p, "dim", 0) < created.ndim or p == Replicate() else Replicate()
            for p in placed
        ]
        if tuple(target) == replicated.placements:
            return replicated
        return replicated.redistribute(placements=target)

    return install_creation(module, create)


def install_creation(module: nn.Module, create: CreateTensor) -> list[RemovableHandle]:
    """Calls a function in place of those that create tensors while a module's forward runs.

    Args:
        module: any; the entry of a module inside of it applies there.
        create: is called instead.
    """
    modes: list[Any] = []

    def enter(_: nn.Module, __: Any) -> None:
        mode: Any = _FactoryMode(create)
        modes.append(mode)
        mode.__enter__()

    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        if modes:
            modes.pop().__exit__(None, None, None)

    return [
        module.register_forward_pre_hook(enter),
        register_always_called(module, leave, prepend=True),
    ]


class _FactoryMode(TorchFunctionMode):
    def __init__(self, create: CreateTensor) -> None:
        super().__init__()
        self._create = create

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _PLACED or _is_decided.get():
            return func(*args, **(kwargs or {}))
        # The modes of outer modules are called by this call: they leave the tensor as it is.
        token = _is_decided.set(True)
        try:
            return self._create(func, args, kwargs or {})
        finally:
            _is_decided.reset(token)
