"""A group of parameters, planned into one layout: its buffers, and which of them modules see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from dbuffer import DBuffer
from dbuffer.collectives import Strategy
from fsdp import adopt
from fsdp.meshes import sharded_placements
from fsdp.parameter import ManagedParameter
from fsdp.reduce import Reducer
from fsdp.streams import Streams
from fsdp.unshard import Gatherer
from ragged_shard.planner import TensorSpec, plan_layout

__all__ = ["Group"]

ALIGNMENT = 16  # bytes, of which every shard is a multiple in every dtype that it is sent in


class Group:
    """Parameters that are gathered and reduced as one.

    Args:
        params: of one dtype, on one device.
        mesh: of one axis, or of two for HSDP.
        device: that computes.
        mp_policy: which dtypes compute and reduce.
        offload_policy: whether shards live on the host.
        strategy: of the collectives; see `DBuffer`.
    """

    def __init__(
        self,
        params: Sequence[ManagedParameter],
        mesh: DeviceMesh,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        strategy: Strategy,
    ) -> None:
        self.params, self.mesh, self.device = list(params), mesh, device
        self.mp_policy, self.offload_policy, self.strategy = mp_policy, offload_policy, strategy
        originals = [p.local_of(_given(p).detach()) for p in self.params]
        self.dtype = originals[0].dtype
        self.layout = plan_layout(
            [
                TensorSpec(p.name, t.numel(), p.block, tuple(t.shape))
                for p, t in zip(self.params, originals, strict=True)
            ],
            mesh.size(mesh.ndim - 1),
            alignment=max(1, ALIGNMENT // min(d.itemsize for d in self._dtypes())),
            order="best" if any(p.block > 1 for p in self.params) else "given",
        )
        self.shard = self.new_shard(self.dtype, originals[0].device)  # owned by us, SHARD
        if self.shard.device.type != "meta":
            self.shard.copy_from(originals)
        for i, param in enumerate(self.params):
            trained = _given(param).requires_grad
            param.sharded = nn.Parameter(self.shard.dtensor(i), requires_grad=trained)
            param.sharded._local_tensor = self.shard.shard(i)  # type: ignore[attr-defined]
            param.original = None
            param.put(param.sharded)
        self.streams = Streams(torch.device("cpu"))  # the root's, once it is known
        self.gatherer = Gatherer(self)
        self.reducer = Reducer(self)
        self.unsharded = False
        self.reshard_after_forward = True
        self.reshard_after_backward = True
        self.unshard_in_backward = True

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the unsharded parameters and their gathers; only floats are cast."""
        wanted = self.mp_policy.param_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point else self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Of the gradients' reduction."""
        return self.mp_policy.reduce_dtype or self.compute_dtype

    @property
    def names(self) -> str:
        """Its parameters, for errors."""
        shown = ", ".join(repr(p.name) for p in self.params[:4])
        return shown + (f" and {len(self.params) - 4} more" if len(self.params) > 4 else "")

    @property
    def pins(self) -> bool:
        """Whether what is offloaded lies in page-locked memory, which only CUDA has."""
        policy = self.offload_policy
        wanted = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
        return wanted and self.device.type == "cuda"

    def new_shard(self, dtype: torch.dtype, device: torch.device) -> DBuffer:
        """A SHARD buffer; on the host if shards are offloaded, on meta if parameters are there."""
        offload = isinstance(self.offload_policy, CPUOffloadPolicy)
        home = torch.device("cpu") if offload else self.device
        on_meta = device.type == "meta"
        pin = offload and self.pins
        return DBuffer(
            self.layout, self.mesh, sharded_placements(self.mesh), dtype,
            device if on_meta else home, pin_memory=pin and not on_meta, strategy=self.strategy,
            inner={i: p.inner for i, p in enumerate(self.params) if p.inner is not None},
        )  # fmt: skip

    def new_buffer(self, dtype: torch.dtype) -> DBuffer:
        """A buffer with memory for all shards, where parameters are computed with."""
        return DBuffer(
            self.layout, self.mesh, sharded_placements(self.mesh), dtype, self.device,
            full=True, strategy=self.strategy,
        )  # fmt: skip

    # What modules see.

    def unshard(self) -> None:
        """Starts a gather, unless one is under way or its result is there."""
        if not self.unsharded and not self.gatherer.under_way:
            self.check_registered()
            self.gatherer.start()

    def wait_for_unshard(self) -> None:
        """Ends the gather, and gives modules the unsharded parameters."""
        if self.unsharded or not self.gatherer.under_way:
            return
        self.gatherer.finish()
        for param in self.params:
            assert param.unsharded is not None
            param.put(param.unsharded)
        self.unsharded = True

    def reshard(self) -> None:
        """Gives modules the sharded parameters, and the memory of the others back."""
        if self.gatherer.under_way:
            self.gatherer.finish()
        elif not self.unsharded:
            return
        if self.unsharded:
            for param in self.params:
                param.put(param.sharded)
        self.gatherer.release()
        self.unsharded = False

    # Changes from outside.

    def check_registered(self) -> None:
        """Raises where modules no longer have the sharded parameters.

        Raises:
            RuntimeError: naming the parameter.
        """
        for param in self.params:
            for place in param.places:
                if place.get() is not param.sharded:
                    raise RuntimeError(
                        f"fsdp: parameter {param.name!r} was replaced after fully_shard, by "
                        f"{adopt.describe(place.get())}; change values in place (under no_grad), "
                        f"load them with load_state_dict, or replace it before fully_shard"
                    )

    def check_ready(self) -> None:
        """Raises where parameters cannot be gathered yet.

        Raises:
            RuntimeError: naming the parameters that are on meta.
        """
        if self.shard.device.type == "meta":
            raise RuntimeError(
                f"fsdp: {self.names} are on the meta device; call model.to_empty(device=...) and "
                f"initialize them, or load a state dict, before the first forward"
            )

    def adopt(self) -> None:
        """Takes over parameters that a module-wide change has put in place of ours."""
        self.reshard()
        adopt.adopt(self)

    def forget_buffers(self) -> None:
        """Buffers and unsharded parameters are made anew when they are needed."""
        self.gatherer = Gatherer(self)
        self.reducer.forget_buffer()
        for param in self.params:
            param.unsharded = None

    def _dtypes(self) -> list[torch.dtype]:
        return [self.dtype, self.compute_dtype, self.reduce_dtype]


def _given(param: ManagedParameter) -> nn.Parameter:
    assert param.original is not None
    return param.original
