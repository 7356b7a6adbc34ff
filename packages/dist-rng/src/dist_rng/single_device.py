"""single_device_rng(geometry=...): a GPU's random numbers on the CPU tensors of this machine.

It handles the operators on plain CPU tensors and on CPU DTensors, with and without ``install()``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dist_rng.distributions import Distribution, Integers, Normal, Uniform
from dist_rng.dtensor.handlers import (
    Handler,
    bind,
    fill_tensor,
    handlers,
    local_of,
    raise_unsupported,
)
from dist_rng.dtensor.patches import patched_initializers
from dist_rng.emulation.device import emulated_device
from dist_rng.philox.geometry import Geometry

aten = torch.ops.aten


@contextmanager
def single_device_rng(*, geometry: Geometry) -> Iterator[None]:
    """Draws on CPU tensors what a GPU of ``geometry`` would have drawn, inside the context.

    This covers in-place fills, ``torch.rand``, ``randn`` and ``randint``, ``*_like``, dropout and
    what is composed of them, on plain tensors and DTensors; the seed is ``torch.manual_seed``'s.
    Uniform, Bernoulli, dropout masks and integers equal the GPU's bit for bit; normal and
    exponential are close to them (``dist_rng.emulation.backend`` documents the errors).

    It patches what ``emulated_device`` and the ``nn.init`` part of ``install`` patch, ``F.dropout``
    and ``torch.dropout``, and restores them at the end.

    Raises:
        ValueError: inside the context, from an operator that is not emulated, such as ``randperm``.
    """
    with emulated_device(geometry), patched_initializers(), fused_dropout(), _DrawAsOnGpu():
        yield


# torch's functions without patches: CPUs compose dropout, GPUs have one fused operator.
_COMPOSED, _COMPOSED_TORCH = F.dropout, torch.dropout


@contextmanager
def fused_dropout() -> Iterator[None]:
    """Makes dropout call the fused operator, under all of its names.

    The mode also handles functions that were imported by name, but is disabled inside
    ``Tensor.backward``, where activation checkpointing calls them again; the patched attributes
    are not.
    """
    F.dropout, torch.dropout = _dropout, _torch_dropout
    try:
        with _FusedDropoutMode():
            yield
    finally:
        F.dropout, torch.dropout = _COMPOSED, _COMPOSED_TORCH


class _FusedDropoutMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        replacements = {_COMPOSED: _dropout, _COMPOSED_TORCH: _torch_dropout}
        return replacements.get(func, func)(*args, **(kwargs or {}))


def _dropout(
    input: Tensor,  # noqa: A002  # torch's name and order
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if training and not inplace and 0.0 < p < 1.0:
        return torch.native_dropout(input, p, True)[0]
    return _COMPOSED(input, p, training, inplace)


def _torch_dropout(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002
    return _dropout(input, p, train)


class _DrawAsOnGpu(TorchDispatchMode):
    """Calls the handlers for random operators on CPU tensors, plain or distributed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handlers = handlers() | _factories()
        overloads = (getattr(aten.randperm, name) for name in aten.randperm.overloads())
        self._handlers.update(dict.fromkeys(overloads, raise_unsupported))  # another algorithm

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is None or not _on_cpu(args, kwargs):
            return func(*args, **kwargs)
        return handler(func, args, kwargs)


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if tensors:
        return local_of(tensors[0]).device.type == "cpu"  # the drawn tensor, or the one it is like
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


def _factories() -> dict[Any, Handler]:
    """Returns handlers for the operators that create a tensor and draw it."""
    table: dict[Any, Handler] = {}
    for name, distribution_of in _FACTORIES.items():
        packet = getattr(aten, name)
        for overload in packet.overloads():
            table[getattr(packet, overload)] = (
                raise_unsupported if "out" in overload else _factory(distribution_of)
            )
    table[aten.normal.float_float] = _factory(lambda a: Normal(a["mean"], a["std"]))
    return table


_FACTORIES: dict[str, Callable[[dict[str, Any]], Distribution]] = {
    "rand": lambda a: Uniform(),
    "randn": lambda a: Normal(),
    "randint": lambda a: Integers(a.get("low", 0), a["high"]),
}


def _factory(distribution_of: Callable[[dict[str, Any]], Distribution]) -> Handler:
    def handler(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        named = bind(operator, args, kwargs)
        draw, generator = distribution_of(named), kwargs.pop("generator", None)
        dtype = torch.int64 if isinstance(draw, Integers) else torch.get_default_dtype()
        options = {"dtype": dtype} | {
            key: value for key, value in kwargs.items() if key in _OPTIONS
        }
        return fill_tensor(torch.empty(named["size"], **options), draw, generator)

    return handler


_OPTIONS = ("dtype", "layout", "device", "pin_memory")
