"""Which elements dropout zeroes, as one hash."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode


class DropoutMasks(TorchFunctionMode):
    """While active, notes the mask of every call of ``torch.nn.functional.dropout``, in order.

    A mask is what the call zeroed: elements that were not zero before and are zero after. That of
    a DTensor is gathered, so all ranks must make the same calls; a plain tensor's is the rank's
    own. Nothing is drawn and no result is changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._digest = hashlib.sha256()
        self._calls = self._zeroed = self._eligible = 0

    def hexdigest(self) -> str | None:
        """Returns the SHA-256 of the masks and their shapes; None where nothing was dropped out."""
        return self._digest.hexdigest() if self._calls else None

    @property
    def share(self) -> float:
        """Of the elements that were not zero before, those that were zeroed."""
        return self._zeroed / self._eligible if self._eligible else 0.0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``func``, and looks at what it did if it is dropout."""
        del types
        kwargs = kwargs or {}
        # What activation checkpointing repeats is not noted again: Tensor.backward comes by here
        # itself, and runs without this mode.
        if func is not dropout:
            return func(*args, **kwargs)
        # Before the call, which may work in place.
        before = _zeros(args[0])
        result = func(*args, **kwargs)
        mask = _zeros(result) & ~before
        self._digest.update(repr(tuple(mask.shape)).encode() + mask.numpy().tobytes())
        self._calls += 1
        self._zeroed += int(mask.sum())
        self._eligible += int((~before).sum())
        return result


@torch.no_grad()
def _zeros(tensor: Tensor) -> Tensor:
    zeros = tensor == 0
    return zeros.full_tensor() if isinstance(zeros, DTensor) else zeros
