"""The reduction of a group's gradients: placed in one pass, one reduce-scatter, sharded `.grad`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from dbuffer import DBuffer, Handle

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsdp.group import Group

__all__ = ["Reducer"]


class Reducer:
    """A group's GRAD buffer, and the reduction of what is in it.

    Gradients of backwards that are not reduced (``set_requires_gradient_sync(False)``) are added
    up in the buffer, in the reduce dtype; so nothing is sent for them.

    Attributes:
        reduce_grads: whether a backward reduces at all.
        all_reduce_grads: whether HSDP's replicas are reduced, too.
        divide_factor: of the sum over ranks; None for their number, or 1 if gradients are terms.
        reduce_unused: whether parameters without a gradient count as having zeros.
        sum_only: whether only sums are sent, and divided here.
        all_reduce_hook: called with the reduced shard, flat, of the reduce dtype.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buffer: DBuffer | None = None  # GRAD: reduce dtype, all shards, ours
        self._have: set[int] = set()  # parameters whose gradients are in the buffer
        self._handle: Handle | None = None
        self._event: Any = None  # the reduction was issued after this
        self._pre_scale = self._post_scale = 1.0  # of what goes into the buffer, and of its sum
        # (shard_size,), reduce dtype, ours: reduced over shards and not over replicas
        self._partial: torch.Tensor | None = None
        self._partial_have: set[int] = set()
        self.reduce_grads = True
        self.all_reduce_grads = True
        self.divide_factor: float | None = None
        self.reduce_unused = False
        self.sum_only = False
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a reduction was started and not finished."""
        return self._handle is not None

    def take(self) -> None:
        """Moves the unsharded gradients into the buffer: cast, scaled and placed in one pass."""
        found: dict[int, torch.Tensor] = {}
        for i, param in enumerate(self._group.params):
            whole = param.unsharded
            if whole is None or whole.grad is None:
                continue
            found[i] = whole.grad
            whole.grad = None
        if not found:
            return
        grads = self._group.pieces(found)
        if self.under_way:  # of an earlier call of the same module
            self.finish()
        if self._have:
            assert self._buffer is not None
            self._buffer.add_from(grads, alpha=self._pre_scale)
        else:
            self._acquire().copy_from(grads, scale=self._pre_scale)
        self._have |= set(found)

    def reduce(self) -> None:
        """Starts the reduction of what is in the buffer, unless it is put off."""
        if not self.reduce_grads or self.under_way:
            return
        group = self._group
        if self.reduce_unused:
            trained = {i for i, p in enumerate(group.params) if p.sharded.requires_grad}
            if trained and not self._have:
                self._acquire().zero_()
            self._have |= trained
        if not self._have:
            return
        buffer = self._buffer
        assert buffer is not None
        # What is divided by may have been set since the first gradient was taken.
        buffer.set_placements(self._terms)
        self._post_scale = self._scale / self._pre_scale
        placed = group.streams.record()
        with group.streams.on(group.streams.reduce):
            group.streams.wait(placed)
            self._handle = buffer.reduce_scatter_(async_op=True)

    def finish(self) -> None:
        """Ends the reduction: the sharded parameters have their gradients, the memory is back."""
        if self._handle is None:
            return
        group, buffer = self._group, self._buffer
        assert buffer is not None
        with group.streams.on(group.streams.reduce):
            self._handle.wait()
            shard = buffer.local  # (shard_size,), reduce dtype
            have = self._have
            if self._partial is not None:
                shard.add_(self._partial)
                have, self._partial = have | self._partial_have, None
            put_off = group.mesh.ndim == 2 and not self.all_reduce_grads
            if put_off:
                self._partial, self._partial_have = shard.clone(), have
            else:
                if group.mesh.ndim == 2:
                    buffer.all_reduce_(0)
                if self.all_reduce_hook is not None:
                    self.all_reduce_hook(shard)
                if self._post_scale != 1.0:
                    shard.mul_(self._post_scale)
                self._give(shard, sorted(have))
            done = group.streams.record()
        group.streams.wait(done)
        buffer.release()
        self._handle, self._have = None, set()
        if not put_off:
            self._run_hooks(have)

    def drop(self) -> None:
        """Forgets gradients that are not reduced yet."""
        if self._handle is not None:
            self._handle.wait()
        if self._buffer is not None:
            self._buffer.release()
        for param in self._group.params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        self._handle, self._have, self._partial = None, set(), None

    def forget_buffer(self) -> None:
        """The buffer is made anew when it is needed."""
        self.drop()
        self._buffer = None

    def _waits_for_(self) -> str:
        """For `fused_comm.diagnosis`."""
        names = (param.name for i, param in enumerate(self._group.params) if i in self._have)
        return f"fsdp: the gradients of {', '.join(names)}"

    def _acquire(self) -> DBuffer:
        """The buffer, held, for gradients to be reduced."""
        group = self._group
        if self._buffer is None:
            self._buffer = group.new_buffer(group.reduce_dtype)
        self._buffer.acquire()
        self._buffer.set_placements(self._terms)
        self._pre_scale = self._scale_before()
        return self._buffer

    def check_not_partly_reduced(self, what: str) -> None:
        """Refuses another division of gradients that are reduced over shards and not replicas.

        Args:
            what: the method that asks.

        Raises:
            ValueError: there are such gradients.
        """
        if self._partial is not None:
            raise ValueError(
                f"{what}: expected no gradients that wait for their all-reduce "
                f"(set_requires_all_reduce(False)), got those of {self._group.names}; call it "
                f"before the first backward of a step"
            )

    @property
    def _terms(self) -> list[Partial]:
        """What the buffer's content is along each axis."""
        return [Partial("avg" if self._average else "sum")] * self._group.mesh.ndim

    @property
    def _average(self) -> bool:
        half, sums = self._group.reduce_dtype == torch.float16, self._group.sums_gradients
        return self.divide_factor is None and not self.sum_only and not half and not sums

    @property
    def _factor(self) -> float:
        """What sums are divided by; means by nothing more."""
        if self._average:
            return 1.0
        ranks = 1 if self._group.sums_gradients else self._group.mesh.size()
        return self.divide_factor or float(ranks)

    @property
    def _scale(self) -> float:
        """Of a gradient, before and after the reduction together."""
        return 1.0 / self._factor

    def _scale_before(self) -> float:
        """The part of it that comes before the reduction.

        float16 overflows in sums and underflows in quotients, so it is divided half before and
        half after, by powers of two first (as FSDP2's _get_gradient_divide_factors).
        """
        before = 1
        if self._group.reduce_dtype == torch.float16:
            while self._factor % before == 0 and self._factor / before > before:
                before *= 2
        return 1.0 / before

    def _give(self, shard: torch.Tensor, have: list[int]) -> None:
        """Gives the sharded parameters their gradients, or adds to those that they have.

        They are views of one new tensor, which lives as long as one of them.
        """
        group = self._group
        home = group.home
        flat = torch.empty(shard.shape, dtype=group.dtype, device=home, pin_memory=group.pins)
        flat.copy_(shard, non_blocking=home.type != "cpu")
        sums, parts = [], []
        for i in have:
            param = group.params[i].sharded
            piece = group.own_gradient(flat, i)
            if param.grad is None:
                param.grad = DTensor(piece, _spec(param), requires_grad=False)
            elif (
                isinstance(param.grad, DTensor) and param.grad.placements == _spec(param).placements
            ):
                sums.append(param.grad._local_tensor)
                parts.append(piece)
            else:
                raise RuntimeError(
                    f"fsdp: the gradient of {group.params[i].name!r} was replaced by "
                    f"{type(param.grad).__name__} of other placements; set it to None, or keep "
                    f"{_spec(param).placements}"
                )
        if sums:
            torch._foreach_add_(sums, parts)

    def _run_hooks(self, have: set[int]) -> None:
        """Runs what was registered by ``register_post_accumulate_grad_hook``."""
        for i in sorted(have):
            param = self._group.params[i].sharded
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            for hook in list(hooks.values()):
                hook(param)


def _spec(param: nn.Parameter) -> Any:
    assert isinstance(param, DTensor)
    return param._spec
