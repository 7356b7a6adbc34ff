"""A group of parameters that are gathered and reduced as one: when, and what modules see of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from dbuffer import DBuffer, Strategy
from fsdp import adopt
from fsdp.comms import Comms
from fsdp.gather import Gather
from fsdp.grouping import Dtypes, dtypes_of
from fsdp.meshes import sharded_placements
from fsdp.parameter import ManagedParameter
from fsdp.reduce import Reducer
from fsdp.streams import Streams
from ragged_shard.planner import Layout

__all__ = ["Group"]


class Group(ABC):
    """Parameters that are gathered and reduced as one; `planned` and `extension` have the kinds.

    Args:
        params: of one dtype, on one device; made the sharded ones of their modules here.
        mesh: of one axis, or of two for HSDP.
        device: that computes.
        mp_policy: which dtypes compute and reduce.
        offload_policy: whether shards live on the host.
        strategy: of the collectives; see `DBuffer`.

    Attributes:
        layout: of the buffers: of gradients and, where parameters are planned, of these.
        gatherer: of the unsharded parameters.
        reducer: of the gradients.
        shard: a buffer that says how the group is cut; where parameters are planned, they are in
            it.
        keeps_memory: whether unsharded parameters keep theirs, with its addresses, when resharded.
    """

    layout: Layout
    gatherer: Gather
    shard: DBuffer

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
        self.mp_policy, self.offload_policy = mp_policy, offload_policy
        self.comms, self.strategy = Comms(strategy), strategy
        self.dtype = self.params[0].given.dtype
        self.streams = Streams(torch.device("cpu"))  # the root's, once it is known
        self.reducer = Reducer(self)
        self.unsharded = self.keeps_memory = False
        self.mixed_dtypes: tuple[str, ...] = ()  # of parameters put in place of the sharded ones
        self.reshard_after_forward = True
        self.reshard_after_backward = True
        self.unshard_in_backward = True

    # What the kinds do each in their way.

    @property
    @abstractmethod
    def on_meta(self) -> bool:
        """Whether the shards have no memory yet."""

    @abstractmethod
    def pieces(self, grads: Mapping[int, torch.Tensor]) -> Mapping[int | str, torch.Tensor]:
        """What `new_buffer` keeps of whole gradients, local tensors, given by parameter."""

    @abstractmethod
    def own_gradient(self, flat: torch.Tensor, i: int) -> torch.Tensor:
        """This rank's part of a parameter's gradient in the shard of such a buffer."""

    @abstractmethod
    def adopt(self) -> None:
        """Takes over parameters that a module-wide change has put in place of ours."""

    # What can be changed.

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """Whether parameters are freed after forward, of all ranks but for the own shard."""
        self.reshard_after_forward = reshard

    @property
    def reshards_to_fewer(self) -> bool:
        """Whether parameters are sharded over fewer ranks between forward and backward."""
        return False

    # What it is.

    def new_buffer(self, dtype: torch.dtype) -> DBuffer:
        """A buffer with memory for all shards, where parameters are computed with."""
        return DBuffer(
            self.layout, self.mesh, sharded_placements(self.mesh), dtype, self.device,
            full=True, strategy=self.comms, name=lambda: self.names,
        )  # fmt: skip

    @property
    def dtypes(self) -> Dtypes:
        """Of its parameters as they are now, of computing and of reducing."""
        return dtypes_of(self.dtype, self.mp_policy)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the unsharded parameters and their gathers."""
        return self.dtypes.compute

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Of the gradients' reduction."""
        return self.dtypes.reduce

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are terms of a sum, as their placements say, and not to be averaged."""
        placed = self.params[0].placed
        return placed is not None and bool(placed.own)

    @property
    def names(self) -> str:
        """Its parameters, for errors."""
        shown = ", ".join(repr(p.name) for p in self.params[:4])
        return shown + (f" and {len(self.params) - 4} more" if len(self.params) > 4 else "")

    @property
    def home(self) -> torch.device:
        """Where shards and their gradients live."""
        offload = isinstance(self.offload_policy, CPUOffloadPolicy)
        return torch.device("cpu") if offload else self.device

    @property
    def pins(self) -> bool:
        """Whether what is offloaded lies in page-locked memory, which only CUDA has."""
        policy = self.offload_policy
        wanted = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
        return wanted and self.device.type == "cuda"

    def _waits_for_(self) -> str:
        """For `fused_comm.diagnosis`."""
        return f"fsdp: the parameters {', '.join(param.name for param in self.params)}"

    # What modules see.

    def unshard(self, *, for_backward: bool = False) -> None:
        """Starts a gather, unless one is under way or its result is there."""
        if self.unsharded or self.gatherer.under_way:
            return
        self.check_registered()
        self.check_ready()
        self.gatherer.start(for_backward=for_backward)

    def wait_for_unshard(self) -> None:
        """Ends the gather, and gives modules the unsharded parameters."""
        if self.unsharded or not self.gatherer.under_way:
            return
        self.gatherer.finish()
        for param in self.params:
            assert param.unsharded is not None
            param.put(param.unsharded)
        self.unsharded = True

    def reshard(self, *, after_forward: bool = False) -> None:
        """Gives modules the sharded parameters, and the memory of the others back."""
        if self.gatherer.under_way:
            self.gatherer.finish()
        elif not self.unsharded:
            if not after_forward:
                self.gatherer.forget_kept()
            return
        if self.unsharded:
            for param in self.params:
                param.put(param.sharded)
        self.gatherer.release(after_forward=after_forward)
        self.unsharded = False

    # Changes from outside.

    def check_registered(self) -> None:
        """Raises where modules no longer have the sharded parameters.

        Raises:
            RuntimeError: naming the parameter.
        """
        if self.mixed_dtypes:
            raise RuntimeError(
                f"fsdp: expected one dtype of {self.names}, got {', '.join(self.mixed_dtypes)}; "
                f"change or load all parameters of a group alike"
            )
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
        if self.on_meta:
            awaited = [repr(p.name) for p in self.params if p.sharded.device.type == "meta"]
            raise RuntimeError(
                f"fsdp: {', '.join(awaited)} are on the meta device; call "
                f"model.to_empty(device=...) and initialize them, or load a state dict, before "
                f"the first forward"
            )

    def show(self, i: int, sharded: nn.Parameter) -> None:
        """Makes a parameter the sharded one of its modules."""
        param = self.params[i]
        param.sharded, param.original = sharded, None
        param.put(sharded)
