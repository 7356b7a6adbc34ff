"""Muon's Newton-Schulz iteration by `torch.compile`, one graph for each shape."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeAlias

import torch

from fsdp.optim.muon.newton_schulz import NsCoefficients, newton_schulz

__all__ = ["Backend", "CompiledNewtonSchulz", "check_backend"]

Backend: TypeAlias = str | Callable[..., Any]


class CompiledNewtonSchulz:
    """Compiles `newton_schulz` once for each shape and each set of options.

    Sizes are constants in a graph, and a matrix of a known shape compiles nothing. Each shape has
    a copy of the function's code, because torch limits the graphs of one code object to
    ``torch._dynamo.config.recompile_limit``, which is 8, and a model can have more shapes.

    Args:
        backend: of `torch.compile`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._compiled: dict[object, Callable[..., torch.Tensor]] = {}

    def __call__(
        self, matrix: torch.Tensor, coefficients: NsCoefficients, steps: int, eps: float
    ) -> torch.Tensor:
        """Does what `newton_schulz` does; bits are those of the backend."""
        coefficients = (coefficients[0], coefficients[1], coefficients[2])
        key = (tuple(matrix.shape), matrix.dtype, matrix.device, coefficients, steps, eps)
        if key not in self._compiled:
            rows, columns = matrix.shape
            code = newton_schulz.__code__.replace(co_name=f"newton_schulz_{rows}x{columns}")
            function = FunctionType(code, newton_schulz.__globals__)
            self._compiled[key] = torch.compile(
                function, backend=self._backend, dynamic=False, fullgraph=True
            )
        return self._compiled[key](matrix, coefficients, steps, eps)


def check_backend(backend: Backend | None) -> None:
    """Checks a backend of `torch.compile`.

    Raises:
        ValueError: torch has no backend of this name, or it is neither a name nor a function.
    """
    if backend is None or callable(backend):
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(
            f"Muon: expected compile_backend to be None, a function or one of {known}, got "
            f"{backend!r}"
        )
