"""Groups whose parameters lie in one planned buffer: gathered in place, without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer
from fsdp import adopt
from fsdp.group import Group
from fsdp.grouping import balanced, plan_buffer, specs_of
from fsdp.meshes import sharded_placements
from fsdp.quantized.gather import TileGatherer
from fsdp.unshard import Gatherer
from fused_comm import redistribute_many

__all__ = ["PlannedGroup"]


class PlannedGroup(Group):
    """Ordinary parameters, planned into one layout; see `Group` for the arguments.

    Args:
        backward_mesh: over whose last axis parameters are cut between forward and backward; None
            for that of `mesh`.
    """

    def __init__(self, *args: Any, backward_mesh: DeviceMesh | None = None) -> None:
        super().__init__(*args)
        layout = plan_buffer(specs_of(self.params), self.mesh.size(self.mesh.ndim - 1), self.dtypes)
        self.layout = balanced(layout, self.params, self.mesh)
        self.backward_mesh = backward_mesh
        device = self.params[0].given.device
        self.shard = self.new_shard(self.dtype, device)  # owned by us, SHARD
        for i, param in enumerate(self.params):
            trained = param.given.requires_grad
            if self.shard.device.type != "meta":
                self._fill(i, param.local())
            sharded = nn.Parameter(self.shard.dtensor(i), requires_grad=trained)
            sharded._local_tensor = self.shard.shard(i)  # type: ignore[attr-defined]
            self.show(i, sharded)
        self.gatherer = self._new_gatherer()

    @property
    def on_meta(self) -> bool:
        """As of `Group`."""
        return any(param.sharded.device.type == "meta" for param in self.params)

    def new_shard(self, dtype: torch.dtype, device: torch.device) -> DBuffer:
        """A SHARD buffer; on the host if shards are offloaded, on meta if parameters are there."""
        on_meta = device.type == "meta"
        return DBuffer(
            self.layout, self.mesh, sharded_placements(self.mesh), dtype,
            device if on_meta else self.home, pin_memory=self.pins and not on_meta,
            strategy=self.strategy,
            inner={
                i: p.placed.inner
                for i, p in enumerate(self.params)
                if p.placed is not None and p.placed.inner is not None
            },
            name=lambda: self.names,
        )  # fmt: skip

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """As of `Group`: a number of ranks, if there was one, no longer counts."""
        super().set_reshard_after_forward(reshard)
        self.backward_mesh = None
        self.gatherer.forget_kept()

    @property
    def reshards_to_fewer(self) -> bool:
        """As of `Group`."""
        return self.backward_mesh is not None

    def pieces(self, grads: Mapping[int, torch.Tensor]) -> Mapping[int | str, torch.Tensor]:
        """As of `Group`; of TP parameters placed as those are, all moved in one collective."""
        moving: dict[int, DTensor] = {}
        wanted = []
        for i, grad in grads.items():
            placed = self.params[i].placed
            if placed is None or not isinstance(grad, DTensor):
                continue
            placements = placed.gradient_placements(grad)
            if grad.placements != placements:
                moving[i] = grad
                wanted.append(placements)
        if moving:
            with torch.no_grad():
                moved = redistribute_many(list(moving.values()), wanted)
            grads = {**grads, **dict(zip(moving, moved, strict=True))}
        return {i: self._local_gradient(i, grad) for i, grad in grads.items()}

    def _local_gradient(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        placed = self.params[i].placed
        if not isinstance(grad, DTensor):
            return grad
        return grad._local_tensor if placed is None else placed.local_gradient(grad)

    def _fill(self, i: int, whole: torch.Tensor) -> None:
        """Takes this rank's part of a parameter."""
        own, held = self.shard.shard(i), self.layout.part(i, self.shard.rank)
        own.copy_(whole.reshape(-1)[held.start : held.stop].view(own.shape))

    def own_gradient(self, flat: torch.Tensor, i: int) -> torch.Tensor:
        """As of `Group`."""
        own = self.shard.shard(i)
        return flat.as_strided(own.shape, own.stride(), own.storage_offset())

    def adopt(self) -> None:
        """As of `Group`."""
        self.reshard()
        adopt.adopt(self)

    def forget_buffers(self) -> None:
        """Buffers and unsharded parameters are made anew when they are needed."""
        self.gatherer = self._new_gatherer()
        self.reducer.forget_buffer()
        for param in self.params:
            param.unsharded = None

    def _new_gatherer(self) -> Gatherer:
        quantised = any(param.tiles is not None for param in self.params)
        return TileGatherer(self) if quantised else Gatherer(self)
