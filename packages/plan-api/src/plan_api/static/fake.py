"""Models without memory: their tensors are torch's FakeTensors, which know shapes alone.

What a model makes itself, such as positions and masks, is real, and may be looked at; met by a
FakeTensor it is taken for its shape. So no mode is on while it runs, in which DTensor's arithmetic
on shards would be fake too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

from plan_api.runtime.containers import map_tensors

__all__ = ["Faker", "is_fake"]


class Faker:
    """Makes FakeTensors of tensors.

    Args:
        device: of them, by its type, as a mesh has it; whatever a tensor is on, ``meta`` included.
    """

    def __init__(self, device: str) -> None:
        self._mode, self._device = FakeTensorMode(allow_non_fake_inputs=True), device

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this one's shape, strides and dtype; a parameter of a parameter."""
        made: torch.Tensor
        if isinstance(tensor, DTensor):
            local: Any = tensor.detach()
            made = DTensor.from_local(
                self.of(local.to_local()), tensor.device_mesh, tensor.placements,
                run_check=False, shape=tensor.shape, stride=tensor.stride(),
            )  # fmt: skip
        else:
            with self._mode:
                made = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
                )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, tensor.requires_grad)
        return made

    def inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a model with FakeTensors in them."""
        return (
            tuple(map_tensors(one, self.of) for one in args),
            {name: map_tensors(one, self.of) for name, one in kwargs.items()},
        )


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it has a shape alone, itself or what a DTensor holds."""
    return isinstance(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, FakeTensor)
