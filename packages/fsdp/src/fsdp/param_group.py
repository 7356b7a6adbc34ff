"""Parameter groups: the parameters that are gathered and reduced together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate

from dbuffer import BufferMemory, DBuffer, Strategy, dtensor_of, verify
from fsdp.collectives.all_gather import GroupAllGather, PlannedAllGather
from fsdp.collectives.comm import BufferSpec, CommStreams, GroupCollectives, merge_shards
from fsdp.collectives.extensions import ExtensionAllGather, chunk_layout, chunk_spec, local_chunk
from fsdp.collectives.grad_dtype import set_unsharded_grad_dtypes
from fsdp.collectives.group_layout import balance_owners, dtypes_of, plan_buffer, tensor_specs
from fsdp.collectives.narrow import NarrowReductions, ranks_of, send_dtypes
from fsdp.collectives.reduce_scatter import GradientSpec, GroupReduceScatter, ShardView
from fsdp.collectives.resident import ChangeTracker, ReplicaGather, ResidentAllGather
from fsdp.collectives.stages import GroupStage, group_stage
from fsdp.mesh import Roles, optimizer_mesh, sharded_placements
from fsdp.param import FSDPParam, chunk_rows, describe, param_names
from fsdp.quantized.all_gather import QuantizedAllGather
from fused_comm import redistribute_many
from fused_comm.narrow_sums import SendDtype
from ragged_shard.planner import Layout

__all__ = [
    "ExtensionParamGroup",
    "FSDPParamGroup",
    "GroupOptions",
    "PlannedParamGroup",
    "set_names",
    "verify_groups",
]


@dataclass(frozen=True)
class GroupOptions:
    """The arguments of fully_shard that groups need.

    Attributes:
        device: that computes.
        mp_policy: of the group's dtypes.
        offload_policy: whether shards are on the host.
        strategy: of the collectives; see `DBuffer`.
        roles: of `fully_shard`'s ``placements``; None for those of FSDP2.
        send_dtype: in which terms of gradients are sent; None for that of their sums.
    """

    device: torch.device
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    strategy: Strategy
    roles: Roles | None = None
    send_dtype: SendDtype = None

    def reductions_on(self, mesh: DeviceMesh) -> Strategy | NarrowReductions:
        """Returns the collectives of gradients on a group's mesh."""
        sent = send_dtypes(self.send_dtype, mesh)
        if not sent:
            return self.strategy
        return NarrowReductions(
            self.strategy, {ranks_of(mesh, axis): dtype for axis, dtype in sent.items()}
        )

    @property
    def shard_device(self) -> torch.device:
        """The device of sharded parameters and their gradients."""
        offloads = isinstance(self.offload_policy, CPUOffloadPolicy)
        return torch.device("cpu") if offloads else self.device

    @property
    def pin_memory(self) -> bool:
        """Whether offloaded shards are in page-locked memory, for accelerators to copy from."""
        policy = self.offload_policy
        pins = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
        return pins and self.device.type not in ("cpu", "meta")


class FSDPParamGroup(ABC):
    """Parameters that are gathered and reduced together.

    `PlannedParamGroup` has ordinary parameters, `ExtensionParamGroup` tensors with
    ``fsdp_pre_all_gather``.

    Args:
        params: of one dtype, on one device; their sharded parameters are registered here.
        mesh: of one axis, or of two for HSDP.
        options: of the call.

    Attributes:
        shard: a buffer of the group's layout; where parameters are planned, they are in it.
        all_gather: of the unsharded parameters.
        reduce_scatter: of the gradients.
        dtypes: of the group; the sharded one changes with a module-wide cast.
        keep_unsharded_storage: whether unsharded parameters keep their memory when resharded.
    """

    shard: DBuffer
    all_gather: GroupAllGather
    reduce_scatter: GroupReduceScatter

    def __init__(
        self, params: Sequence[FSDPParam], mesh: DeviceMesh, options: GroupOptions
    ) -> None:
        self.params, self.mesh, self.options = list(params), mesh, options
        self._set_dtypes(self.params[0].orig_param.dtype)
        self.annotated = [param for param in self.params if param.is_annotated]
        self.collectives = GroupCollectives(options.reductions_on(mesh))
        self.streams = CommStreams(torch.device("cpu"))  # the root's, once that is known
        self.is_unsharded = self.keep_unsharded_storage = False
        self.mixed_dtypes: tuple[str, ...] = ()  # of parameters that replaced the sharded ones
        self.reshard_after_forward = True
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.changes = ChangeTracker(self.params)
        self._syncs_gradients = True

    @property
    @abstractmethod
    def on_meta(self) -> bool:
        """Whether a sharded parameter has no memory yet."""

    def tensors_between_steps(self) -> list[torch.Tensor]:
        """Returns tensors in all memory that parameters have between steps; some share it."""
        return [param.sharded_param for param in self.params]

    @abstractmethod
    def reset_sharded_params(self) -> None:
        """Makes the parameters that modules have now the sharded ones.

        `load_state_dict`, ``to_empty``, ``to`` and ``half`` may have replaced them.

        Raises:
            RuntimeError: one is no DTensor with the placements of the sharded parameter.
        """

    # Options.

    @property
    def keeps_parameters(self) -> bool:
        """Whether unsharded parameters stay in memory between steps."""
        return self.options.roles is not None and self.options.roles.keeps_parameters

    def _set_dtypes(self, dtype: torch.dtype) -> None:
        """Sets the dtypes of the group, and of its gradients, by that of the parameters."""
        policy = self.options.mp_policy
        self.dtypes = dtypes_of(self.params, dtype, policy)
        set_unsharded_grad_dtypes(self.params, dtype, self.dtypes.compute, policy)

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """Sets whether parameters are freed after forward; a number of ranks no longer counts.

        Where they stay between steps, modules have the sharded parameters after forward always.
        """
        self.reshard_after_forward = reshard or self.keeps_parameters
        self.all_gather.post_forward_mesh = None
        self._free_post_forward_shard()

    def set_requires_gradient_sync(self, required: bool) -> None:
        """Sets whether gradients are reduced; if not, as far as the gradient's role says."""
        roles, self._syncs_gradients = self.options.roles, required
        reduces = roles is not None and roles.reduces_each_backward
        self.reduce_scatter.reduce_grads = required or reduces
        self.reduce_scatter.all_reduce_grads = required

    def end_iteration(self) -> None:
        """Is called after a last backward, when an optimizer may change the parameters."""
        if self._syncs_gradients:
            self.changes.expire()

    def set_streams(self, streams: CommStreams) -> None:
        """Sets the streams of both collectives."""
        self.streams = self.all_gather.streams = self.reduce_scatter.streams = streams

    @property
    def names(self) -> str:
        """The names of the parameters, for errors."""
        return param_names(self.params)

    def tensor_names(self) -> list[str]:
        """Returns the parameter of each tensor in the buffer; extensions have one for each rank."""
        times = len(self.shard.layout.specs) // len(self.params)
        return [param.name for param in self.params] * times

    def describe_collectives(self) -> str:
        """Returns what decides the collectives of the group, beside its buffer."""
        trained = any(param.sharded_param.requires_grad for param in self.params)
        return (
            f"gathered in {self.dtypes.compute}, reduced in {self.dtypes.reduce}, "
            f"{'trained' if trained else 'frozen'}, "
            f"reshard_after_forward={self.reshard_after_forward}"
            + ("" if self.options.roles is None else f", {self.options.roles}")
            + "".join(param.describe_form() for param in self.params)
        )

    def _waits_for_(self) -> str:
        """Describes a wait, for `fused_comm.diagnosis`."""
        return f"fsdp: the parameters {', '.join(param.name for param in self.params)}"

    # Unshard and reshard.

    def unshard(self, *, for_backward: bool = False) -> None:
        """Starts the all-gather, unless one is in flight or nothing is missing."""
        is_complete = self.is_unsharded and self.all_gather.is_complete(for_backward=for_backward)
        if is_complete or self.all_gather.in_flight:
            return
        if not self.is_unsharded:
            self._check_registered()
            self._check_materialized()
        if self.reduce_scatter.reuses_memory:  # of an earlier backward through the modules
            self.reduce_scatter.wait()
        with group_stage(GroupStage.ALL_GATHER, self.all_gather):
            self.all_gather.start(for_backward=for_backward)

    def wait_for_unshard(self) -> None:
        """Waits for the all-gather, and registers the unsharded parameters on the modules."""
        if not self.all_gather.in_flight:
            return
        self._wait_for_all_gather()
        if self.is_unsharded:  # what was missing was gathered
            return
        for param in self.params:
            assert param.unsharded_param is not None
            param.set_on_modules(param.unsharded_param)
        self.is_unsharded = True

    def restore_annotations(self) -> None:
        """Annotates unsharded parameters, while spmd_types checks them."""
        for param in self.annotated:
            param.restore_annotation()

    def memory_for_gradients(self) -> BufferMemory | None:
        """Returns the memory of the unsharded parameters if gradients can be reduced in it.

        It is to be kept when they are resharded, and used before they are gathered again.
        """
        memory = self.all_gather.memory if self.is_unsharded else None
        if memory is None or self.keep_unsharded_storage or not self.reshard_after_backward:
            return None
        return memory if self.reduce_scatter.can_use(memory) else None

    def reshard(self, *, after_forward: bool = False, keep_storage: bool = False) -> None:
        """Registers the sharded parameters on the modules, and frees the unsharded ones.

        Args:
            after_forward: whether backward follows.
            keep_storage: whether their memory stays allocated.
        """
        if self.all_gather.in_flight:
            self._wait_for_all_gather()
        elif not self.is_unsharded:
            if not after_forward:
                self._free_post_forward_shard()
            return
        if self.is_unsharded:
            for param in self.params:
                param.set_on_modules(param.sharded_param)
        with group_stage(GroupStage.RESHARD, self.all_gather):
            self.all_gather.free(
                after_forward=after_forward,
                keep_storage=keep_storage or self.keep_unsharded_storage,
            )
        self.is_unsharded = False

    def _wait_for_all_gather(self) -> None:
        with group_stage(GroupStage.ALL_GATHER_WAIT, self.all_gather):
            self.all_gather.wait()

    def _free_post_forward_shard(self) -> None:
        with group_stage(GroupStage.RESHARD, self.all_gather):
            self.all_gather.free_post_forward_shard()

    def _check_registered(self) -> None:
        """Checks that modules have the sharded parameters.

        Raises:
            RuntimeError: naming the parameter.
        """
        if self.mixed_dtypes:
            raise RuntimeError(
                f"fsdp: expected one dtype of {self.names}, got {', '.join(self.mixed_dtypes)}; "
                f"change or load all parameters of a group to one dtype"
            )
        for param in self.params:
            for location in param.locations:
                if location.get() is not param.sharded_param:
                    raise RuntimeError(
                        f"fsdp: parameter {param.name!r} was replaced after fully_shard, by "
                        f"{describe(location.get())}; change values in place (under no_grad), "
                        f"load them with load_state_dict, or replace it before fully_shard"
                    )

    def _check_materialized(self) -> None:
        """Checks that the sharded parameters have memory.

        Raises:
            RuntimeError: naming the parameters that are on meta.
        """
        if self.on_meta:
            on_meta = [p.name for p in self.params if p.sharded_param.device.type == "meta"]
            raise RuntimeError(
                f"fsdp: FSDP parameters should be materialized from meta device before training: "
                f"{', '.join(map(repr, on_meta))} are on the meta device; call "
                f"model.to_empty(device=...) and initialize them, or load a state dict"
            )

    def _new_reduce_scatter(
        self, buffers: BufferSpec, views: Sequence[ShardView], to_buffer: Any
    ) -> GroupReduceScatter:
        placement = self.params[0].placement
        is_sum = placement is not None and placement.sums_terms
        roles = self.options.roles
        is_replicated = roles is not None and not roles.shards_optimizer
        gradients = GradientSpec(
            self.params, views, to_buffer, is_sum, is_replicated,
            roles is not None and roles.shards_over_replicas,
            self.options.shard_device, self.options.pin_memory,
        )  # fmt: skip
        return GroupReduceScatter(
            gradients, buffers, self.dtypes.sharded, self.dtypes.reduce, self.streams
        )

    def _reset_grad_dtypes(self) -> None:
        """Reads which ``grad_dtype`` the sharded parameters have now."""
        before = self.dtypes.reduce
        for param in self.params:
            param.keep_grad_dtype(param.sharded_param)
        self._set_dtypes(self.dtypes.sharded)
        if self.dtypes.reduce != before:
            self.reduce_scatter.reset_dtypes(self.dtypes.sharded, self.dtypes.reduce)


class PlannedParamGroup(FSDPParamGroup):
    """Ordinary parameters, in one planned layout; see `FSDPParamGroup` for the other arguments.

    Args:
        post_forward_mesh: over whose last axis parameters are sharded between forward and backward;
            None for that of `mesh`.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh: DeviceMesh,
        options: GroupOptions,
        post_forward_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(params, mesh, options)
        over_replicas = options.roles is not None and options.roles.shards_over_replicas
        self._shard_mesh = optimizer_mesh(mesh) if over_replicas else mesh
        ranks = self._shard_mesh.size(self._shard_mesh.ndim - 1)
        layout = plan_buffer(tensor_specs(self.params), ranks, self.dtypes)
        self._layout = layout = balance_owners(layout, self.params, self._shard_mesh)
        joined = merge_shards(layout, mesh.size(mesh.ndim - 1)) if over_replicas else layout
        self._buffers = BufferSpec(joined, mesh, options.device, self.collectives, self.params)
        self._replicas: ReplicaGather | None = None  # of HFSDP, made with `shard`
        device = self.params[0].orig_param.device
        self.shard = self._new_shard(self.dtypes.sharded, device)
        for i, param in enumerate(self.params):
            trained = param.orig_param.requires_grad
            local = self._local(i)
            if local.device.type != "meta":
                whole = param.local_tensor().reshape(-1)
                if self._is_sharded:
                    interval = layout.part(i, self.shard.rank)
                    whole = whole[interval.start : interval.stop]
                local.copy_(whole.view(local.shape))
            # nn.Parameter detaches it, and the result has the offset of the local tensor.
            no_offset = local.new_empty(()).expand(local.shape)
            placed = dtensor_of(no_offset, self.shard.dtensor(i)._spec)
            sharded_param = nn.Parameter(placed, requires_grad=trained)
            sharded_param._local_tensor = local  # type: ignore[attr-defined]
            param.init_sharded_param(sharded_param)
        self.all_gather = self._new_all_gather(post_forward_mesh)
        begin = int(self.shard.local.storage_offset())
        shards = [self._local(i) for i in range(len(self.params))]
        views = [
            ShardView(s.shape, s.stride(), int(s.storage_offset()) - begin if s.numel() else 0)
            for s in shards
        ]
        self.reduce_scatter = self._new_reduce_scatter(
            self._buffers,
            views,
            partial(_local_gradients, self.params, self.options.mp_policy.reduce_dtype),
        )

    @property
    def _is_sharded(self) -> bool:
        """Whether this rank's sharded parameters are a part, and not all of them as under DDP."""
        return self.options.roles is None or self.options.roles.shards_optimizer

    @property
    def on_meta(self) -> bool:
        """Implements `FSDPParamGroup`."""
        return any(param.sharded_param.device.type == "meta" for param in self.params)

    def tensors_between_steps(self) -> list[torch.Tensor]:
        """Returns those of `FSDPParamGroup`, and what its ``placements`` keep gathered."""
        tensors = super().tensors_between_steps()
        if self._replicas is not None:
            tensors.append(self._replicas.shard.local)
        if isinstance(self.all_gather, ResidentAllGather) and self.all_gather.resident is not None:
            tensors.append(self.all_gather.resident.local)
        return tensors

    def reset_sharded_params(self) -> None:
        """Makes the parameters that modules have now views of the SHARD buffer.

        Values are copied into the buffer; where device or dtype changed, into a new one. Parameters
        on meta stay there, as `load_state_dict` and a module-wide change set one module after
        another; so do those of several dtypes, until all have one.

        Raises:
            RuntimeError: one is no DTensor with the placements of the sharded parameter.
        """
        self.reshard()
        self.changes.expire()
        current = [param.registered_dtensor() for param in self.params]
        if all(
            now is param.sharded_param and param.is_registered(now) and self._is_view(i, now)
            for i, (param, now) in enumerate(zip(self.params, current, strict=True))
        ):
            self.mixed_dtypes = ()
            self._reset_grad_dtypes()
            return
        loaded = [now._local_tensor for now in current if now.device.type != "meta"]
        dtypes = {local.dtype for local in loaded or [now._local_tensor for now in current]}
        self.mixed_dtypes = tuple(sorted(map(str, dtypes))) if len(dtypes) > 1 else ()
        if self.mixed_dtypes:
            return
        (dtype,) = dtypes
        materialized = self.shard.device.type == "meta" and bool(loaded)
        if dtype != self.dtypes.sharded or materialized:
            device = (loaded or [current[0]._local_tensor])[0].device
            self._reset_buffers(dtype, device)
        with torch.no_grad():
            for i, (param, now) in enumerate(zip(self.params, current, strict=True)):
                local, own = now._local_tensor, self._local(i)
                if local.device.type != "meta" or self.shard.device.type == "meta":
                    if local is not own and local.device.type != "meta":
                        own.copy_(local)
                    now._local_tensor = own
                param.init_sharded_param(now)
        self._reset_grad_dtypes()

    def _is_view(self, i: int, param: Any) -> bool:
        """Returns whether a parameter is in the SHARD buffer, or on meta and not loaded yet."""
        not_loaded = param.device.type == "meta" and self.shard.device.type != "meta"
        return not_loaded or param._local_tensor is self._local(i)

    def _local(self, i: int) -> torch.Tensor:
        """Returns this rank's part of a sharded parameter: all of it where it is replicated."""
        return self.shard.shard(i) if self._is_sharded else self.shard.view(i)

    def _reset_buffers(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates a new SHARD buffer; the others are made again when they are needed."""
        self._set_dtypes(dtype)
        self.shard = self._new_shard(dtype, device)
        self.all_gather = self._new_all_gather(self.all_gather.post_forward_mesh)
        self.reduce_scatter.reset_dtypes(self.dtypes.sharded, self.dtypes.reduce)
        for param in self.params:
            param.unsharded_param = None

    def _new_shard(self, dtype: torch.dtype, device: torch.device) -> DBuffer:
        """Allocates a SHARD buffer: on meta if parameters are, on the host if they are offloaded.

        Args:
            dtype: of the sharded parameters.
            device: of the parameters.
        """
        on_meta, options = device.type == "meta", self.options
        device = device if on_meta else options.shard_device
        is_on_device = on_meta or device == options.device
        full, memory = False, None
        placements = sharded_placements(self._shard_mesh)
        if not self._is_sharded:
            placements = (Replicate(),) * self.mesh.ndim
        if self._shard_mesh is not self.mesh:
            self._replicas = self._new_replica_gather(dtype, on_meta=on_meta)
            if is_on_device and dtype == self._replicas.shard.dtype:
                memory = self._replicas.part
        elif self.keeps_parameters:
            full = is_on_device and dtype == self.dtypes.compute
        shard = DBuffer(
            self._layout, self._shard_mesh, placements, dtype, device,
            full=full,
            memory=memory,
            pin_memory=options.pin_memory and not on_meta,
            strategy=self.collectives if full else options.strategy,
            inner=self._buffers.inner,
            name=self._buffers.names,
        )  # fmt: skip
        if self._replicas is not None and memory is None:
            self._replicas.source = shard
        return shard

    def _new_replica_gather(self, dtype: torch.dtype, *, on_meta: bool) -> ReplicaGather:
        """Allocates the shard that replicas have in common between steps, for HFSDP."""
        quantized = any(param.gathered_as is not None for param in self.params)
        shard = DBuffer(
            self._buffers.layout, self.mesh, sharded_placements(self.mesh),
            dtype if quantized else self.dtypes.compute,
            "meta" if on_meta else self.options.device,
            strategy=self.options.strategy, name=self._buffers.names,
        )  # fmt: skip
        return ReplicaGather(shard, self._buffers, self.changes)

    def _new_all_gather(self, post_forward_mesh: DeviceMesh | None) -> PlannedAllGather:
        if self.keeps_parameters:
            return ResidentAllGather(
                self.shard, self.params, self._buffers, self.dtypes.compute, self.streams,
                self.changes,
            )  # fmt: skip
        quantized = any(param.gathered_as is not None for param in self.params)
        kind = QuantizedAllGather if quantized else PlannedAllGather
        return kind(
            self.shard if self._replicas is None else self._replicas.shard,
            self.params, self._buffers, self.dtypes.compute, self.streams, post_forward_mesh,
            self._replicas,
        )  # fmt: skip


def _local_gradients(
    params: Sequence[FSDPParam],
    reduce_dtype: torch.dtype | None,
    grads: Mapping[int, torch.Tensor],
) -> Mapping[int | str, torch.Tensor]:
    """Returns local tensors of gradients; of TP parameters, redistributed in one collective.

    What is Partial on other axes, as the gradients of norms under sequence parallelism, is summed
    in ``reduce_dtype`` there, too, if that is wider.
    """
    found: dict[int | str, torch.Tensor] = {}
    moved: list[int] = []
    terms: dict[int, int] = {}
    sources, targets = [], []
    for i, grad in grads.items():
        placement = params[i].placement
        if placement is not None:
            conversion = placement.grad_conversion(grad)
            if conversion.terms != 1:
                terms[i] = conversion.terms
            if conversion.target is not None:
                moved.append(i)
                sources.append(_widened(placement.as_dtensor(grad), reduce_dtype))
                targets.append(conversion.target)
        found[i] = grad._local_tensor if isinstance(grad, DTensor) else grad
    if moved:
        with torch.no_grad():
            results = redistribute_many(sources, targets)
        found.update(zip(moved, (one._local_tensor for one in results), strict=True))
    for i, number in terms.items():
        found[i] = found[i] / number
    return found


def _widened(grad: DTensor, dtype: torch.dtype | None) -> DTensor:
    """Casts a gradient to a dtype that has all values of its own."""
    if dtype is None or torch.promote_types(grad.dtype, dtype) != dtype:
        return grad
    with torch.no_grad():
        return cast(DTensor, grad.to(dtype))


class ExtensionParamGroup(FSDPParamGroup):
    """Parameters that are gathered through their own hooks; see `FSDPParamGroup`."""

    def __init__(
        self, params: Sequence[FSDPParam], mesh: DeviceMesh, options: GroupOptions
    ) -> None:
        super().__init__(params, mesh, options)
        shapes = [p.local_shape for p in self.params]
        axis = mesh.ndim - 1
        rank, ranks = mesh.get_local_rank(axis), mesh.size(axis)
        layout = chunk_layout([p.name for p in self.params], shapes, ranks)
        self._buffers = BufferSpec(layout, mesh, options.device, self.collectives, self.params)
        # Never filled: ranks compare their plans by it.
        self.shard = DBuffer(
            layout, mesh, sharded_placements(mesh), self.dtypes.sharded, "meta",
            name=self._buffers.names,
        )  # fmt: skip
        for param in self.params:
            trained, chunk = param.orig_param.requires_grad, self._chunk(param, rank, ranks)
            param.init_sharded_param(nn.Parameter(chunk, requires_grad=trained))
        self.all_gather = self._new_all_gather()
        own = range(rank * len(self.params), (rank + 1) * len(self.params))
        self.reduce_scatter = self._new_reduce_scatter(
            self._buffers,
            [_shard_view(layout, tensor, rank) for tensor in own],
            self._split_gradients,
        )

    @property
    def on_meta(self) -> bool:
        """Implements `FSDPParamGroup`."""
        return any(local_chunk(param).device.type == "meta" for param in self.params)

    def _split_gradients(
        self, grads: Mapping[int, torch.Tensor]
    ) -> Mapping[int | str, torch.Tensor]:
        """Returns the chunks of unsharded gradients, by number of the tensor in the layout."""
        params, ranks = self.params, len(self._buffers.layout.specs) // len(self.params)
        chunks: dict[int | str, torch.Tensor] = {}
        for i, grad in _local_gradients(params, self.options.mp_policy.reduce_dtype, grads).items():
            assert isinstance(i, int)
            sizes = [chunk_rows(params[i].gathered_shape[0], ranks, r) for r in range(ranks)]
            for rank, rows in enumerate(grad.split(sizes)):
                chunks[rank * len(params) + i] = rows
        return chunks

    def reset_sharded_params(self) -> None:
        """Implements `FSDPParamGroup`; the tensors that modules have now are not copied.

        Raises:
            RuntimeError: one is no DTensor with the placements of the sharded parameter, or has
                another local shape.
        """
        self.reshard()
        for param in self.params:
            now: Any = param.registered_dtensor()
            shape = local_chunk(param).shape
            if now._local_tensor.shape != shape:
                raise RuntimeError(
                    f"fsdp: parameter {param.name!r} was replaced after fully_shard, by "
                    f"{describe(now)} with {tuple(now._local_tensor.shape)} of it on this rank; "
                    f"expected {tuple(shape)}"
                )
            param.init_sharded_param(now)
        dtype = local_chunk(self.params[0]).dtype
        if dtype != self.dtypes.sharded:
            self._set_dtypes(dtype)
            self.all_gather = self._new_all_gather()
            self.reduce_scatter.reset_dtypes(self.dtypes.sharded, self.dtypes.reduce)
        self._reset_grad_dtypes()

    def _new_all_gather(self) -> ExtensionAllGather:
        return ExtensionAllGather(
            self.params, self._buffers, self.dtypes.compute, self.options.mp_policy, self.streams
        )

    @torch.no_grad()
    def _chunk(self, param: FSDPParam, rank: int, ranks: int) -> DTensor:
        """Returns this rank's chunk, made by those operators that FSDP2 needs of subclasses."""
        whole: Any = param.orig_param
        original = whole if param.placement is None else whole._local_tensor
        chunks = list(torch.chunk(original, ranks, dim=0))
        rows = chunk_rows(original.shape[0], ranks, rank)
        padded = original.new_zeros(chunks[0].size())
        if rows:
            padded.narrow(0, 0, rows).copy_(chunks[rank])
        if padded.device.type != "meta":
            padded = padded.to(self.options.shard_device)
        spec = chunk_spec(param, self.mesh)
        return DTensor(padded.narrow(0, 0, rows), spec, requires_grad=False)


def _shard_view(layout: Layout, tensor: int, rank: int) -> ShardView:
    shape = layout.specs[tensor].shape
    assert shape is not None
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return ShardView(shape, stride, layout.starts[tensor] - rank * layout.shard_size)


# What a root does with the groups of all modules below it.


def set_names(root: nn.Module, groups: Sequence[FSDPParamGroup]) -> None:
    """Renames parameters to their names from the root, for errors."""
    names = {id(module): name for name, module in root.named_modules()}
    for group in groups:
        for param in group.params:
            location = param.locations[0]
            prefix = names.get(id(location.module))
            if prefix is not None:
                param.name = f"{prefix}.{location.name}" if prefix else location.name


def verify_groups(groups: Sequence[FSDPParamGroup]) -> None:
    """Compares the plans of all ranks by hash.

    Raises:
        ValueError: on every rank, where two differ.
    """
    for mesh in dict.fromkeys(group.shard.mesh for group in groups):
        on_mesh = [group for group in groups if group.shard.mesh == mesh]
        verify(
            [group.shard for group in on_mesh],
            names=[group.tensor_names() for group in on_mesh],
            options=[group.describe_collectives() for group in on_mesh],
        )
