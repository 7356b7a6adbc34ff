"""Counts the operators that take a DTensor, above the dispatch of torch and dtensor-rules."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DTensorOperators(TorchDispatchMode):
    """Counts operators within its context.

    Attributes:
        counts: number of calls with a DTensor among the arguments, by the operator's name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Counts an operator and runs it."""
        kwargs = kwargs or {}
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            self.counts[str(func)] += 1
        return func(*args, **kwargs)
