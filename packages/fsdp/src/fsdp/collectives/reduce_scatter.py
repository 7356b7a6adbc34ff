"""The reduction of a group's gradients: one copy into the buffer, one reduce-scatter, `.grad`.

Note: the path of a gradient.
    unsharded_param.grad --copy_in--> gradient buffer --start: reduce_scatter_--> its shard
    --wait: all_reduce_ (HSDP) or reduce_scatter_ (HFSDP), hook, scale, all_gather_ (DDP)-->
    sharded_param.grad, views of one new tensor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial

from dbuffer import BufferMemory, DBuffer, Handle, dtensor_of
from fsdp.collectives.comm import BufferSpec, CommStreams
from fsdp.collectives.grad_dtype import promoted
from fsdp.collectives.stages import GroupStage, group_stage
from fsdp.mesh import spec_with_dtype
from fsdp.param import FSDPParam, param_names

__all__ = ["GradientSpec", "GroupReduceScatter", "ShardView"]


@dataclass(frozen=True)
class ShardView:
    """Where a parameter's part of a shard is, which ``as_strided`` takes.

    Attributes:
        shape: of this rank's part.
        stride: in elements.
        offset: in elements, from the begin of the shard.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class GradientSpec:
    """Describes the gradients of one group.

    Attributes:
        params: of the group.
        views: of their parts in this rank's shard of the gradient buffer, or in the whole buffer,
            in the same order.
        to_buffer: converts unsharded gradients, by number of the parameter, to the local tensors
            that are copied into the buffer, by number or name of its tensor.
        is_sum: whether gradients are terms of a sum, as their placements say, and not averaged.
        is_replicated: whether the gradients of sharded parameters are whole, as of DDP.
        over_replicas: whether they are sharded over HSDP's replicas, too.
        device: of the sharded gradients.
        pin_memory: whether these are in page-locked memory.
    """

    params: Sequence[FSDPParam]
    views: Sequence[ShardView]
    to_buffer: Callable[[Mapping[int, torch.Tensor]], Mapping[int | str, torch.Tensor]]
    is_sum: bool
    is_replicated: bool
    over_replicas: bool
    device: torch.device
    pin_memory: bool


class GroupReduceScatter:
    """Reduces the gradients of one group in a buffer of the reduce dtype.

    Gradients of backwards that are not reduced (``set_requires_gradient_sync(False)``) are
    accumulated in the buffer, in the reduce dtype, and nothing is sent for them. Those that are
    reduced at once may be in the memory that the unsharded parameters had.

    Args:
        gradients: describes them.
        buffers: describes the gradient buffer.
        grad_dtype: of the sharded gradients of parameters that have no ``grad_dtype``.
        reduce_dtype: of the buffer; a gradient whose parameter `FSDPParam.follows_grad` may make it
            wider.
        streams: the root's, once that is known.

    Attributes:
        reduce_grads: whether a backward reduces at all.
        all_reduce_grads: whether HSDP's replicas are reduced, too.
        divide_factor: of the sum over ranks; None for their number, or 1 if gradients are terms.
        reduce_unused: whether parameters without a gradient count as having zeros.
        sum_only: whether collectives only sum, and the mean is taken here.
        all_reduce_hook: called with the reduced shard, flat, of the reduce dtype.
        all_reduce_hook_stream: that it runs on; None for that of the reduce-scatters.
    """

    def __init__(
        self,
        gradients: GradientSpec,
        buffers: BufferSpec,
        grad_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        streams: CommStreams,
    ) -> None:
        self._gradients, self._buffers, self.streams = gradients, buffers, streams
        self._grad_dtype, self._reduce_dtype = grad_dtype, reduce_dtype
        self._buffer: DBuffer | None = None  # the one of the two that was used last
        self._own: DBuffer | None = None  # reduce dtype, memory for all shards
        self._reused: DBuffer | None = None  # the same in the memory of the unsharded parameters
        self._over_replicas: DBuffer | None = None  # HFSDP: its shard, in the same memory
        self._copied: set[int] = set()  # parameters whose gradients are in the buffer
        self._handle: Handle | None = None
        self._reduces_replicas = False  # whether the reduction in flight does, of its backward
        self._pre_scale = self._post_scale = 1.0  # of what is copied in, and of its sum
        # (shard_size,), reduce dtype: reduced over shards and not over replicas
        self._partial: torch.Tensor | None = None
        self._partial_scale = 1.0  # as _pre_scale
        self._partial_copied: set[int] = set()
        self.reduce_grads = True
        self.all_reduce_grads = True
        self.divide_factor: float | None = None
        self.reduce_unused = False
        self.sum_only = False
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.all_reduce_hook_stream: torch.Stream | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a reduction was started and not waited for."""
        return self._handle is not None

    @property
    def is_partly_reduced(self) -> bool:
        """Whether gradients are reduced over shards, and no reduction in flight adds replicas'."""
        completes = self.in_flight and self._reduces_replicas
        return self._partial is not None and not completes

    @property
    def reuses_memory(self) -> bool:
        """Whether a reduction is in flight in the memory of the unsharded parameters."""
        return self.in_flight and self._buffer is self._reused

    def can_use(self, memory: BufferMemory) -> bool:
        """Returns whether `copy_in` and `start` can be called with this memory, and will use it.

        Gradients that are not reduced at once stay in memory of their own.
        """
        unsharded_grads = self._unsharded_grads()
        if not unsharded_grads or not self.reduce_grads or self._copied or self.in_flight:
            return False
        itemsize = self._dtype_with(unsharded_grads).itemsize
        return self._buffers.layout.buffer_size * itemsize == memory.bytes.numel()

    def copy_in(self, memory: BufferMemory | None = None) -> None:
        """Moves the unsharded gradients into the buffer: cast and scaled in one pass.

        Args:
            memory: for which `can_use` is true; None for the buffer's own.
        """
        if self.reduce_unused and self.reduce_grads:
            self._check_unused_dtypes()
        unsharded_grads = self._unsharded_grads()
        if not unsharded_grads:
            return
        self._drop_unsharded_grads()
        with group_stage(GroupStage.COPY_IN, self):
            reduce_scatter_inputs = self._gradients.to_buffer(unsharded_grads)
            if self.in_flight:  # of an earlier backward
                self.wait()
            dtype = self._dtype_with(unsharded_grads)
            if self._copied:
                buffer = self._with_dtype(dtype)
                buffer.add_from(reduce_scatter_inputs, alpha=self._pre_scale)
            else:
                buffer = self._acquire(dtype, memory)
                buffer.copy_from(reduce_scatter_inputs, scale=self._pre_scale)
        self._copied |= set(unsharded_grads)

    def start(self) -> None:
        """Issues the reduce-scatter of the buffer, unless this backward does not reduce."""
        if not self.reduce_grads or self.in_flight:
            return
        if self.reduce_unused:
            params = self._gradients.params
            trained = {i for i, p in enumerate(params) if p.sharded_param.requires_grad}
            if trained and not self._copied:
                self._acquire(self._dtype_with({})).zero_()
            self._copied |= trained
        if not self._copied:
            return
        buffer, streams = self._buffer, self.streams
        assert buffer is not None
        # The divide factor may have been set since the first gradient was copied in.
        buffer.set_placements(self._placements())
        self._post_scale = 1.0 / self._divisor() / self._pre_scale
        copied_in = streams.record()
        with group_stage(GroupStage.REDUCE_SCATTER, self), streams.on(streams.reduce_scatter):
            streams.wait(copied_in)
            self._handle = buffer.reduce_scatter_(async_op=True)
        self._reduces_replicas = self._buffers.mesh.ndim == 2 and self.all_reduce_grads

    def wait(self) -> None:
        """Waits for the reduction, assigns the sharded gradients, and frees the buffer."""
        if self._handle is not None:
            with group_stage(GroupStage.REDUCE_SCATTER_WAIT, self):
                assigned = self._finish(self._handle)
            self._run_post_accumulate_grad_hooks(assigned)

    def _finish(self, handle: Handle) -> set[int]:
        """Does what `wait` does; returns the parameters whose gradients were assigned."""
        buffer, streams = self._buffer, self.streams
        assert buffer is not None
        awaits_all_reduce = self._buffers.mesh.ndim == 2 and not self._reduces_replicas
        with streams.on(streams.reduce_scatter):
            handle.wait()
            reduce_output = buffer.local  # (shard_size,), reduce dtype
            copied = self._copied
            if self._partial is not None:
                scale = self._pre_scale / self._partial_scale
                reduce_output.add_(self._partial, alpha=scale)
                copied, self._partial = copied | self._partial_copied, None
            if awaits_all_reduce:
                self._partial, self._partial_copied = reduce_output.clone(), copied
                self._partial_scale = self._pre_scale
            else:
                if self._reduces_replicas:
                    reduce_output = self._reduce_replicas(buffer)
                if self.all_reduce_hook is not None:
                    self._run_all_reduce_hook(self.all_reduce_hook, reduce_output)
                if self._post_scale != 1.0:
                    reduce_output.mul_(self._post_scale)
                if self._gradients.is_replicated:  # an all-reduce with the bits of FSDP
                    with group_stage(GroupStage.GATHER_GRADS, self):
                        buffer.all_gather_()
                    reduce_output = buffer.local  # (buffer_size,)
                with group_stage(GroupStage.ASSIGN_GRADS, self):
                    self._assign(reduce_output, sorted(copied))
            reduced = streams.record()
        streams.wait(reduced)
        buffer.release()
        self._handle, self._copied = None, set()
        return set() if awaits_all_reduce else copied

    def _reduce_replicas(self, buffer: DBuffer) -> torch.Tensor:
        """Reduces a shard over HSDP's replicas; returns it, or this replica's part of it."""
        if not self._gradients.over_replicas:
            buffer.all_reduce_(0)
            return buffer.local
        if self._over_replicas is None:
            self._over_replicas = self._buffers.over_replicas(buffer)
        over_replicas = self._over_replicas
        over_replicas.set_placements(buffer.placements[:1])
        over_replicas.reduce_scatter_()
        return over_replicas.local

    def _run_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], reduce_output: torch.Tensor
    ) -> None:
        """Runs the hook on its stream, after what the current one has issued and before the rest.

        The buffer's memory may be used on another stream than its own here, as its own waits.
        """
        streams = self.streams
        reduced = streams.record()
        with streams.on(self.all_reduce_hook_stream or streams.reduce_scatter):
            streams.wait(reduced)
            hook(reduce_output)
            hooked = streams.record()
        streams.wait(hooked)

    def discard(self) -> None:
        """Drops gradients that are not reduced yet."""
        if self._handle is not None:
            self._handle.wait()
        if self._buffer is not None:
            self._buffer.release()
        self._drop_unsharded_grads()
        self._handle, self._copied, self._partial = None, set(), None

    def reset_dtypes(self, grad_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        """Drops gradients and the buffer, after the parameters' dtype or device has changed."""
        self.discard()
        self._buffer = self._own = self._reused = self._over_replicas = None
        self._grad_dtype, self._reduce_dtype = grad_dtype, reduce_dtype

    def check_not_partly_reduced(self, method: str) -> None:
        """Refuses another division of gradients that are reduced over shards and not replicas.

        Args:
            method: that is called, for the error.

        Raises:
            ValueError: there are such gradients.
        """
        if self.is_partly_reduced:
            raise ValueError(
                f"{method}: expected no gradients that wait for their all-reduce "
                f"(set_requires_all_reduce(False)), got those of "
                f"{param_names(self._gradients.params)}; call it before the first backward of a "
                f"step"
            )

    def _waits_for_(self) -> str:
        """Describes a wait, for `fused_comm.diagnosis`."""
        params = self._gradients.params
        names = (param.name for i, param in enumerate(params) if i in self._copied)
        return f"fsdp: the gradients of {', '.join(names)}"

    def _check_unused_dtypes(self) -> None:
        """Refuses zeros for parameters whose gradients have no dtype of their own.

        Raises:
            ValueError: naming the parameter, on every rank.
        """
        for param in self._gradients.params:
            if param.follows_grad and param.sharded_param.requires_grad:
                raise ValueError(
                    f"fsdp: Reducing unused parameters with grad_dtype=None requires an explicit "
                    f"MixedPrecisionPolicy.reduce_dtype so every rank can build zero gradients of "
                    f"the same dtype: {param.name!r}. Set reduce_dtype to the dtype its gradients "
                    f"already have."
                )

    def _dtype_with(self, grads: Mapping[int, torch.Tensor]) -> torch.dtype:
        """Returns the dtype of the buffer with some more gradients, by number of the parameter.

        As in autograd, a gradient that is added to an earlier one does not change its dtype.
        """
        params = self._gradients.params
        first = [i for i in grads if params[i].follows_grad and i not in self._copied]
        dtypes = [grads[i].dtype for i in first]
        if self._copied:
            assert self._buffer is not None
            dtypes.append(self._buffer.dtype)
        if self._partial is not None:
            dtypes.append(self._partial.dtype)
        return promoted([self._reduce_dtype, *dtypes])

    def _with_dtype(self, dtype: torch.dtype) -> DBuffer:
        """Returns the buffer with its content, which is cast if it has another dtype."""
        buffer, scale = self._buffer, self._pre_scale
        assert buffer is not None
        if buffer.dtype == dtype:
            return buffer
        cast = self._acquire(dtype)
        cast.local.copy_(buffer.local)
        if self._pre_scale != scale:
            cast.scale_(self._pre_scale / scale)
        buffer.release()
        return cast

    def _unsharded_grads(self) -> dict[int, torch.Tensor]:
        """Returns the gradients that a backward has computed, by number of the parameter."""
        unsharded_params = [param.unsharded_param for param in self._gradients.params]
        return {
            i: param.grad
            for i, param in enumerate(unsharded_params)
            if param is not None and param.grad is not None
        }

    def _drop_unsharded_grads(self) -> None:
        for param in self._gradients.params:
            if param.unsharded_param is not None:
                param.unsharded_param.grad = None

    def _acquire(self, dtype: torch.dtype, memory: BufferMemory | None = None) -> DBuffer:
        """Returns a buffer, allocated, for gradients that are to be reduced.

        Args:
            dtype: of the buffer.
            memory: as of `copy_in`.
        """
        buffer = self._own if memory is None else self._reused
        if buffer is None or buffer.dtype != dtype or memory not in (None, buffer.memory):
            buffer = self._buffers.full_buffer(dtype, memory=memory)
        else:
            buffer.acquire()
        if memory is None:
            self._own = buffer
        else:
            self._reused = buffer
        if buffer is not self._buffer:
            self._buffer, self._over_replicas = buffer, None
        buffer.set_placements(self._placements())
        self._pre_scale = self._scale_before()
        return buffer

    @property
    def _buffer_dtype(self) -> torch.dtype:
        return self._reduce_dtype if self._buffer is None else self._buffer.dtype

    def _placements(self) -> list[Partial]:
        """Returns the placement of the buffer's content along each axis."""
        return [Partial("avg" if self._is_average() else "sum")] * self._buffers.mesh.ndim

    def _is_average(self) -> bool:
        half, is_sum = self._buffer_dtype == torch.float16, self._gradients.is_sum
        return self.divide_factor is None and not (self.sum_only or half or is_sum)

    def _divisor(self) -> float:
        """Returns what sums are divided by; 1 for averages."""
        if self._is_average():
            return 1.0
        ranks = 1 if self._gradients.is_sum else self._buffers.mesh.size()
        return self.divide_factor or float(ranks)

    def _scale_before(self) -> float:
        """Returns the factor that is applied before the reduction.

        float16 overflows in sums and underflows in quotients, so it is divided half before and
        half after, by powers of two first (as FSDP2's _get_gradient_divide_factors).
        """
        before = 1
        if self._buffer_dtype == torch.float16:
            divisor = self._divisor()
            while divisor % before == 0 and divisor / before > before:
                before *= 2
        return 1.0 / before

    def _assign(self, reduce_output: torch.Tensor, copied: list[int]) -> None:
        """Assigns the gradients of sharded parameters, or adds to those that they have.

        Those of one dtype are views of one new tensor, which is freed with the last of them; where
        ``grad_dtype`` of parameters differs, each has its own.
        """
        gradients = self._gradients
        dtypes = {i: self._sharded_dtype(i, reduce_output) for i in copied}
        flat = None
        if len(set(dtypes.values())) == 1:
            flat = self._to_sharded_grad(reduce_output, dtypes[copied[0]])
        accumulated, sharded_grads = [], []
        for i in copied:
            param, view = gradients.params[i].sharded_param, gradients.views[i]
            source = reduce_output if flat is None else flat
            begin = int(source.storage_offset())
            sharded_grad = source.as_strided(view.shape, view.stride, begin + view.offset)
            if flat is None:
                sharded_grad = self._to_sharded_grad(sharded_grad, dtypes[i])
            assert isinstance(param, DTensor)
            spec = spec_with_dtype(param._spec, sharded_grad.dtype)
            if param.grad is None:
                param.grad = dtensor_of(sharded_grad, spec)
            elif isinstance(param.grad, DTensor) and param.grad.placements == spec.placements:
                accumulated.append(param.grad._local_tensor)
                sharded_grads.append(sharded_grad)
            else:
                raise RuntimeError(
                    f"fsdp: the gradient of {gradients.params[i].name!r} was replaced by "
                    f"{type(param.grad).__name__} of other placements; set it to None, or keep "
                    f"{spec.placements}"
                )
        if accumulated:
            torch._foreach_add_(accumulated, sharded_grads)

    def _sharded_dtype(self, i: int, reduce_output: torch.Tensor) -> torch.dtype:
        """Returns the dtype of the sharded gradient of a parameter."""
        own = self._gradients.params[i].grad_dtype
        return self._grad_dtype if own is None else own.dtype or reduce_output.dtype

    def _to_sharded_grad(self, reduced: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a new tensor with reduced gradients, on the device of sharded ones."""
        device = self._gradients.device
        grad = torch.empty(
            reduced.shape, dtype=dtype, device=device, pin_memory=self._gradients.pin_memory
        )
        return grad.copy_(reduced, non_blocking=device.type != "cpu")

    def _run_post_accumulate_grad_hooks(self, copied: set[int]) -> None:
        """Runs what was registered by ``register_post_accumulate_grad_hook``."""
        for i in sorted(copied):
            param = self._gradients.params[i].sharded_param
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            for hook in list(hooks.values()):
                hook(param)
