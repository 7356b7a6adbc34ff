"""What differs between torch 2.11 and 2.15, and what torch has under a private name only.

tests/test_compat.py holds a canary for each difference, which fails when it is gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "ShapeMode", "divided_axis", "has_symmetric_memory", "has_triton", "is_uneven_view_error",
    "no_compile", "on_host", "symmetric_memory_operators", "use_rule_for_convolution_backward",
]  # fmt: skip

_P = ParamSpec("_P")
_R = TypeVar("_R")


def use_rule_for_convolution_backward() -> None:
    """Has torch place convolutions' gradients by its rule, as up to 2.13, not by its strategy.

    On a mesh of several axes that of 2.14 and 2.15 raises an AssertionError ("mixes None with
    placements") where an output is not asked for, such as the gradient of the images that go into a
    patch embedding (torch/distributed/tensor/_ops/_conv_ops.py, expand_to_full_mesh_op_strategy).
    """
    if TorchVersion(torch.__version__) >= "2.14":
        propagator = DTensor._op_dispatcher.sharding_propagator
        propagator.op_single_dim_strategy_funcs.pop(
            torch.ops.aten.convolution_backward.default, None
        )


def is_uneven_view_error(message: str) -> bool:
    """Whether torch refuses to view a sharded dim as units whose number the axis does not divide.

    The first text is that of later releases, the second that of 2.11
    (torch/distributed/tensor/_ops/_view_ops.py).
    """
    return "unevenly sharded" in message or "Attempted to split the sharded dim" in message


def divided_axis(mesh: DeviceMesh, axis: int, ranks: int) -> DeviceMesh:
    """Returns a mesh in which an axis is two: groups of consecutive ranks, and their ranks.

    All ranks of the root mesh call it, as it makes process groups.

    Args:
        mesh: any, with names.
        axis: by number.
        ranks: of a group; it divides the size of the axis.
    """
    assert mesh.mesh_dim_names is not None
    name = mesh.mesh_dim_names[axis]
    sizes, names = (mesh.size(axis) // ranks, ranks), (f"{name}_groups", f"{name}_group")
    with _disable_current_modes():
        return mesh._unflatten(axis, sizes, names)


def symmetric_memory_operators() -> Any:
    """Returns the namespace of torch's operators on symmetric memory.

    Only the import of a private module, which takes 0.4 s, defines them.
    """
    from torch.distributed import _symmetric_memory  # noqa: F401

    return torch.ops.symm_mem


def has_symmetric_memory(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether the ranks of a group read each other's memory; all of them call it.

    Torch's `is_symm_mem_enabled_for_group` knows only groups for which a deprecated function was
    called, so ranks exchange a buffer, which raises where they cannot.

    Args:
        group: any.
        device_type: of the tensors.
    """
    if device_type != "cuda":
        return False
    from torch.distributed import _symmetric_memory

    device = torch.device("cuda", torch.cuda.current_device())
    found = _symmetric_memory.get_backend(device) is not None
    if found:
        try:
            _symmetric_memory.rendezvous(_symmetric_memory.empty(1, device=device), group)
        except RuntimeError:
            found = False
    agreed = torch.tensor(int(found), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    return bool(agreed)


def has_triton() -> bool:
    """Whether torch compiles kernels for this machine's accelerator by triton."""
    from torch.utils._triton import has_triton as torch_has_triton  # imports triton

    return bool(torch_has_triton())


def no_compile(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps torch.compile from tracing a function: the graph breaks there.

    `torch.compiler.disable` would import torch._dynamo at once, which takes 0.8 s.
    """
    hidden: Callable[_P, _R] = _disable_dynamo(function)
    return hidden


def on_host(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Runs a function outside of all dispatch modes: its tensors are data of the host.

    Where models run on FakeTensors its values are needed all the same, and may be cached.
    """

    @functools.wraps(function)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside


class ShapeMode(FakeTensorMode):
    """Makes FakeTensors, of which grouped products (experts) are computed in every dtype.

    Kernels of CPUs take any dtype, but torch computes the shapes of bfloat16's alone
    (torch/_meta_registrations.py, _meta_grouped_mm_common).
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator on FakeTensors."""
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args, **(kwargs or {}))
        return super().dispatch(func, types, args, kwargs or {})


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns an empty tensor of the shape of a grouped product; see torch's operator."""
    shape = [*left.shape[:-1], right.shape[-1]]
    if left.ndim == right.ndim == 2:  # groups of the summed dim
        assert offs is not None
        shape = [offs.shape[0], *shape]
    elif left.ndim == 3 and right.ndim == 2:  # groups of the columns
        shape = shape[1:]
    return left.new_empty(shape, dtype=out_dtype or left.dtype)
