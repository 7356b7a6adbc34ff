"""Hashes the masks of dropout."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode


class DropoutMasks(TorchFunctionMode):
    """Records the mask of every call of ``torch.nn.functional.dropout`` within the context.

    A mask has the elements that the call zeroed: nonzero before and zero after. The mask of a
    DTensor is gathered, so that all ranks must make the same calls; that of a plain tensor is the
    rank's. Random numbers and results do not change.
    """

    def __init__(self) -> None:
        super().__init__()
        self._digest = hashlib.sha256()
        self._calls = self._zeroed = self._eligible = 0

    def hexdigest(self) -> str | None:
        """Returns the SHA-256 of the masks and their shapes; None if there was no dropout."""
        return self._digest.hexdigest() if self._calls else None

    @property
    def share(self) -> float:
        """Share of zeroed elements among those that were not zero before."""
        return self._zeroed / self._eligible if self._eligible else 0.0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``func``, and records its mask if it is dropout."""
        del types
        kwargs = kwargs or {}
        # Recomputed dropout is not recorded again: Tensor.backward is dispatched here itself, and
        # runs without this mode. plan-api puts a function of its own in torch's place.
        if func is not dropout and func is not nn.functional.dropout:
            return func(*args, **kwargs)
        # Before the call, which may work in place.
        before = _zeros(args[0])
        result = func(*args, **kwargs)
        mask = _zeros(result) & ~before
        self._digest.update(repr(tuple(mask.shape)).encode() + mask.cpu().numpy().tobytes())
        self._calls += 1
        self._zeroed += int(mask.sum())
        self._eligible += int((~before).sum())
        return result


@torch.no_grad()
def _zeros(tensor: Tensor) -> Tensor:
    zeros = tensor == 0
    return zeros.full_tensor() if isinstance(zeros, DTensor) else zeros
