"""What the modules of a model compute in a step between the hooks of `fully_shard`.

`trace_step` runs one step of a copy of the model and records the operators and their memory;
`assumed_trace` makes the same record from sizes alone.

Note: terminology.
    unit: the modules of one call of fully_shard; the model itself is the first unit.
    hook: a point at which fully_shard acts, before or after forward or backward of a unit.
    segment: the computation of a rank between two hooks.
    step: one forward and one backward of every unit, and one step of the optimizer.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fsdp import _compat
from fsdp.param_group import dtypes_of
from fsdp.simulate.units import Unit
from fsdp.state import (
    cast_tensors,
    register_forward_hooks,
    register_post_backward_hook,
    register_pre_backward_hook,
)

__all__ = [
    "ComputeWork", "FSDPHook", "Forward", "HookEvent", "OperatorRecorder", "Segment",
    "assumed_trace", "operator_work", "trace_step",
]  # fmt: skip

Forward: TypeAlias = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class ComputeWork:
    """An amount of computation.

    Attributes:
        flops: flops of matrix products and attention.
        nbytes: bytes that the other operators read and write.
        ops: number of operator calls, including views.
    """

    flops: int = 0
    nbytes: int = 0
    ops: int = 0

    def __add__(self, other: ComputeWork) -> ComputeWork:
        """Returns the sum."""
        return ComputeWork(
            self.flops + other.flops, self.nbytes + other.nbytes, self.ops + other.ops
        )


@dataclass(frozen=True)
class Segment:
    """The computation between two hooks.

    Attributes:
        work: amount of computation.
        peak: maximum of allocated bytes: activations, and unsharded gradients until they are
            copied for the reduction.
        allocated: allocated bytes at the end.
    """

    work: ComputeWork = field(default_factory=ComputeWork)
    peak: int = 0
    allocated: int = 0


class FSDPHook(Enum):
    """A point of a step at which fully_shard acts."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


@dataclass(frozen=True)
class HookEvent:
    """A hook of a unit, and the segment before it."""

    hook: FSDPHook
    unit: int
    before: Segment


def trace_step(
    units: Sequence[Unit], forward: Forward, mp_policy: MixedPrecisionPolicy
) -> list[HookEvent]:
    """Runs a step of a copy of the model, and returns its hooks in order.

    A model on meta runs on fake CPU tensors, without computation; any other model really runs.

    Args:
        units: the units; the first is the model.
        forward: calls the model that it gets, and returns the loss.
        mp_policy: dtypes that parameters and inputs are cast to.

    Raises:
        ValueError: `forward` does not return a loss.
    """
    model = units[0].modules[0]
    on_meta = any(param.device.type == "meta" for param in model.parameters())
    fake: AbstractContextManager[Any] = (
        FakeTensorMode(allow_non_fake_inputs=True) if on_meta else nullcontext()
    )
    with fake:
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = _compute_copy(tensor, mp_policy)
        copied = copy.deepcopy(model, memo)
        recorder = OperatorRecorder(copied)
        names = {id(module): name for name, module in model.named_modules()}
        for index, unit in enumerate(units):
            modules = tuple(copied.get_submodule(names[id(module)]) for module in unit.modules)
            params = [memo[id(one.param)] for one in unit.found]
            recorder.register_unit(index, modules, params, mp_policy)
        with recorder:
            loss: Any = forward(copied)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    f"simulate: expected forward to return the loss, a tensor of one element that "
                    f"requires grad, got {type(loss).__name__}"
                )
            loss.backward()
            recorder.finish_backward()
    return recorder.events


def assumed_trace(units: Sequence[Unit], activations: int, tokens: int) -> list[HookEvent]:
    """Returns the hooks of a step of which only sizes are known.

    Forward calls the units in order, and backward in reverse order.

    Args:
        units: the units; the first is the model.
        activations: bytes that forward saves for backward, divided evenly over all units but the
            model.
        tokens: tokens of a rank in a step: 2 flops per token and parameter in forward, 4 in
            backward.
    """
    inner = range(1, len(units)) or range(1)
    per_unit, allocated = activations // len(inner), 0
    sizes = [sum(one.param.numel() for one in unit.found) for unit in units]
    grads = [
        sum(one.param.nbytes for one in unit.found if one.param.requires_grad) for unit in units
    ]
    events = [HookEvent(FSDPHook.PRE_FORWARD, 0, Segment())]
    for unit in inner:
        work = ComputeWork(2 * tokens * sizes[unit])
        if unit:
            before = Segment(allocated=allocated, peak=allocated)
            events.append(HookEvent(FSDPHook.PRE_FORWARD, unit, before))
        allocated += per_unit
        if unit:
            before = Segment(work, allocated, allocated)
            events.append(HookEvent(FSDPHook.POST_FORWARD, unit, before))
    idle = Segment(ComputeWork(), allocated, allocated)
    root = Segment(ComputeWork(2 * tokens * sizes[0]), allocated, allocated)
    events.append(HookEvent(FSDPHook.POST_FORWARD, 0, root))
    events.append(HookEvent(FSDPHook.PRE_BACKWARD, 0, idle))
    for unit in reversed(range(1, len(units))):
        before = Segment(ComputeWork(), allocated, allocated)
        events.append(HookEvent(FSDPHook.PRE_BACKWARD, unit, before))
        peak, allocated = allocated + grads[unit], allocated - per_unit
        work = ComputeWork(4 * tokens * sizes[unit])
        before = Segment(work, peak, allocated + grads[unit])
        events.append(HookEvent(FSDPHook.POST_BACKWARD, unit, before))
    before = Segment(ComputeWork(4 * tokens * sizes[0]), allocated + grads[0], grads[0])
    return [*events, HookEvent(FSDPHook.POST_BACKWARD, 0, before)]


class OperatorRecorder(TorchDispatchMode):
    """Records the work and memory of all operators, and the hooks of units.

    Args:
        model: its parameters and buffers do not count as memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[HookEvent] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        for tensor in (*model.parameters(), *model.buffers()):
            self._known.add(tensor.untyped_storage())
        self._work, self._allocated, self._peak = ComputeWork(), 0, 0
        self._unfinished: dict[int, list[nn.Parameter]] = {}  # units before their post-backward
        self._in_backward: set[int] = set()  # units after their pre-backward

    def register_unit(
        self,
        unit: int,
        modules: tuple[nn.Module, ...],
        params: list[nn.Parameter],
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        """Registers the hooks of a unit, as fully_shard does."""
        self._unfinished[unit] = params

        def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            dtype = mp_policy.param_dtype if mp_policy.cast_forward_inputs else None
            inputs = cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
            if _compat.in_backward():  # recomputation of activation checkpointing
                return inputs
            self.record(FSDPHook.PRE_FORWARD, unit)
            return register_post_backward_hook(inputs, post_backward)

        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            if not _compat.in_backward():
                self.record(FSDPHook.POST_FORWARD, unit)
                register_pre_backward_hook(output, pre_backward)
            return cast_tensors(output, mp_policy.output_dtype)

        def pre_backward() -> None:
            if unit not in self._in_backward:  # the first of several outputs
                self._in_backward.add(unit)
                self.record(FSDPHook.PRE_BACKWARD, unit)

        def post_backward() -> None:
            self._post_backward(unit)

        register_forward_hooks(modules, pre_forward, post_forward, set(), lambda output: output)

    def record(self, hook: FSDPHook, unit: int) -> None:
        """Records a hook, which ends a segment."""
        self.events.append(HookEvent(hook, unit, Segment(self._work, self._peak, self._allocated)))
        self._work, self._peak = ComputeWork(), self._allocated

    def finish_backward(self) -> None:
        """Records the post-backward of units whose inputs do not require grad."""
        for unit in list(self._unfinished):
            self._post_backward(unit)

    def _post_backward(self, unit: int) -> None:
        self.record(FSDPHook.POST_BACKWARD, unit)
        for param in self._unfinished.pop(unit):
            param.grad = None
        self._peak = self._allocated

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator and records its work and the memory of its results."""
        out = self.call(func, args, kwargs or {})
        self._work += operator_work(func, args, kwargs or {}, out)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self._allocated += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self._peak = max(self._peak, self._allocated)
        return out

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operator."""
        return func(*args, **kwargs)

    def _free(self, nbytes: int) -> None:
        self._allocated -= nbytes


def operator_work(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> ComputeWork:
    """Returns the amount of computation of an operator call."""
    count = _FLOPS.get(func._overloadpacket)
    if count is not None:
        return ComputeWork(int(count(*args, **kwargs, out_val=out)), 0, 1)
    if func.is_view:
        return ComputeWork(ops=1)
    tensors = {id(tensor): tensor for tensor in _tensors((args, kwargs, out))}
    return ComputeWork(0, sum(tensor.nbytes for tensor in tensors.values()), 1)


def _grouped_mm_flops(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Returns the flops of a product of rows with one matrix per expert."""
    return 2 * a.numel() * b.shape[-1]


def _attention_flops(query: torch.Tensor, key: torch.Tensor, products: int) -> int:
    """Returns the flops of `products` products of the size of query times key."""
    return 2 * products * query.numel() * key.shape[-2]


_FLOPS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    torch.ops.aten._grouped_mm: _grouped_mm_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *args, **kwargs: _attention_flops(q, k, 2)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *args, **kwargs: _attention_flops(q, k, 5)
    ),
}


def _compute_copy(tensor: torch.Tensor, mp_policy: MixedPrecisionPolicy) -> torch.Tensor:
    """Returns a copy of a buffer, or of a parameter in its compute dtype."""
    is_param, dtype = isinstance(tensor, nn.Parameter), tensor.dtype
    if isinstance(tensor, nn.Parameter):
        dtype = dtypes_of(dtype, _compat.policy_of(tensor, mp_policy)).compute
    if tensor.device.type == "meta":
        copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    else:
        copied = tensor.detach().to(dtype, copy=True)
    return nn.Parameter(copied, requires_grad=tensor.requires_grad) if is_param else copied


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
