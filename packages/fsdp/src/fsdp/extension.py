"""Groups of tensor subclasses that say themselves what is gathered of them, as torchao's do.

Note: such a parameter is cut as FSDP2 cuts it, along dim 0 into equal chunks, of which the last may
be shorter or empty. ``fsdp_pre_all_gather`` gives the tensors to be gathered of a chunk, of any
dtype and as many as it likes, of the same size on every rank; ``fsdp_post_all_gather`` makes the
unsharded parameter of what all ranks gave. Their signatures are those of
torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dbuffer import DBuffer
from fsdp import adopt
from fsdp.chunks import chunk_layout, chunk_rows
from fsdp.extension_gather import ExtensionGatherer
from fsdp.group import Group
from fsdp.meshes import sharded_placements
from fsdp.parameter import ManagedParameter

__all__ = ["ExtensionGroup", "is_extension"]

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def is_extension(param: torch.Tensor, name: str) -> bool:
    """Whether a parameter says itself what is gathered of it.

    Raises:
        ValueError: it has one of the two hooks, is placed on other axes, or has no dim to cut.
    """
    local = param._local_tensor if isinstance(param, DTensor) else param
    has = [hasattr(local, hook) for hook in _HOOKS]
    if not any(has):
        return False
    kind = type(local).__name__
    if not all(has):
        raise ValueError(
            f"fully_shard: parameter {name!r} is a {kind} with {_HOOKS[has.index(True)]} and "
            f"without {_HOOKS[has.index(False)]}; wants both"
        )
    if isinstance(param, DTensor) or param.ndim == 0:
        what = "a DTensor of other axes" if isinstance(param, DTensor) else "a scalar"
        raise ValueError(
            f"fully_shard: parameter {name!r} is a {kind} and {what}; wants a tensor that can be "
            f"cut along dim 0 alone"
        )
    return True


class ExtensionGroup(Group):
    """Parameters that are gathered through their own hooks; see `Group` for the arguments."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shapes = [tuple(p.given.shape) for p in self.params]
        axis = self.mesh.ndim - 1
        self.rank, self.ranks = self.mesh.get_local_rank(axis), self.mesh.size(axis)
        names = [p.name for p in self.params]
        self.layout = chunk_layout(names, self.shapes, self.ranks)  # each rank's chunks together
        # Never filled: ranks compare by it what they mean.
        self.shard = DBuffer(
            self.layout, self.mesh, sharded_placements(self.mesh), self.dtype, "meta",
            name=lambda: self.names,
        )  # fmt: skip
        for i, param in enumerate(self.params):
            sharded = nn.Parameter(self._cut(param), requires_grad=param.given.requires_grad)
            self.show(i, sharded)
        self.gatherer = ExtensionGatherer(self)

    @property
    def on_meta(self) -> bool:
        """As of `Group`."""
        return any(local_of(param).device.type == "meta" for param in self.params)

    def pieces(self, grads: Mapping[int, torch.Tensor]) -> Mapping[int | str, torch.Tensor]:
        """As of `Group`."""
        found: dict[int | str, torch.Tensor] = {}
        for i, grad in grads.items():
            sizes = [chunk_rows(self.shapes[i][0], self.ranks, rank) for rank in range(self.ranks)]
            for rank, rows in enumerate(grad.split(sizes)):
                found[rank * len(self.params) + i] = rows
        return found

    def own_gradient(self, flat: torch.Tensor, i: int) -> torch.Tensor:
        """As of `Group`."""
        place = self.rank * len(self.params) + i
        begin = self.layout.starts[place] - self.rank * self.layout.shard_size
        spec = self.layout.specs[place]
        assert spec.shape is not None
        return flat[begin : begin + spec.numel].view(spec.shape)

    def adopt(self) -> None:
        """As of `Group`: the tensors are kept as they are.

        Raises:
            RuntimeError: one is no DTensor of our placements, or of another local shape.
        """
        self.reshard()
        for i, param in enumerate(self.params):
            now: Any = adopt.registered(param)
            wanted = local_of(param).shape
            if now._local_tensor.shape != wanted:
                raise RuntimeError(
                    f"fsdp: parameter {param.name!r} was replaced after fully_shard, by "
                    f"{adopt.describe(now)} with {tuple(now._local_tensor.shape)} of it on this "
                    f"rank; wants {tuple(wanted)}"
                )
            self.show(i, now)
        dtype = local_of(self.params[0]).dtype
        if dtype != self.dtype:
            self.dtype = dtype
            self.gatherer = ExtensionGatherer(self)
            self.reducer.forget_buffer()

    @torch.no_grad()
    def _cut(self, param: ManagedParameter) -> DTensor:
        """This rank's chunk of a parameter, made by those operators that FSDP2 asks for."""
        given = param.given
        chunks = list(torch.chunk(given, self.ranks, dim=0))
        rows = chunk_rows(given.shape[0], self.ranks, self.rank)
        own = given.new_zeros(chunks[0].size())
        if rows:
            own.narrow(0, 0, rows).copy_(chunks[self.rank])
        if own.device.type != "meta":
            own = own.to(self.home)
        stride = tuple(math.prod(given.shape[dim + 1 :]) for dim in range(given.ndim))
        meta = TensorMeta(given.shape, stride, given.dtype)
        spec = DTensorSpec(self.mesh, sharded_placements(self.mesh), tensor_meta=meta)
        return DTensor(own.narrow(0, 0, rows), spec, requires_grad=False)


def local_of(param: ManagedParameter) -> Any:
    """This rank's chunk: of the subclass."""
    sharded: Any = param.sharded
    return sharded._local_tensor
