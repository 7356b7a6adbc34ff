"""A tensor of which there are only operands of products, in low precision."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["OperandTensor"]

_aten = torch.ops.aten


class OperandTensor(torch.Tensor):
    """Has a shape, a dtype and a device, and operands instead of elements.

    `low_precision_linear` takes the operands. Aliases share them, and any other operator gets the
    tensor of `plain`. Its gradient is an ordinary tensor of its dtype.

    Attributes:
        operands: which aliases share.
    """

    operands: Any

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[OperandTensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        operands: Any,
    ) -> OperandTensor:
        """Makes one that shares operands, which may be filled later."""
        made: OperandTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=device
        )
        made.operands = operands
        return made

    @abstractmethod
    def plain(self) -> torch.Tensor:
        """Returns an ordinary tensor, of its dtype."""

    def keeps_operands(self, dtype: torch.dtype) -> bool:
        """Whether a cast to a dtype shares the operands."""
        return False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Aliases, and casts that may, share the operands; others get an ordinary tensor."""
        options = {name: value for name, value in (kwargs or {}).items() if value is not None}
        if func in (_aten.detach.default, _aten.alias.default) or (
            func is _aten.view.default and torch.Size(args[1]) == args[0].shape
        ):
            return cls(args[0].shape, args[0].dtype, args[0].device, args[0].operands)
        is_cast = func is _aten._to_copy.default and options.keys() == {"dtype"}
        if is_cast and args[0].keeps_operands(options["dtype"]):
            return cls(args[0].shape, options["dtype"], args[0].device, args[0].operands)
        plain_args, plain_kwargs = tree_map_only(
            cls, lambda one: one.plain(), (args, dict(kwargs or {}))
        )
        return func(*plain_args, **plain_kwargs)
