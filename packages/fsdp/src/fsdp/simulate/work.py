"""What the modules of each call do in a step, and what memory that takes: a model run once.

Note: the words of this folder, beside those of `fsdp.parameter`.
    unit: the modules of one call of fully_shard; the model itself is one, the first.
    span: what a rank computes between two moments at which fully_shard acts.
    step: one forward and one backward of every unit, and the optimizer's.
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

from fsdp import _compat, hooks
from fsdp.grouping import dtypes_of
from fsdp.simulate.units import Unit

__all__ = ["Forward", "Mark", "Moment", "Recorder", "Span", "Work", "assumed", "traced"]

Forward: TypeAlias = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class Work:
    """What is computed.

    Attributes:
        flops: of matrix products and attention.
        nbytes: that the other operators read and write.
        ops: operators that were called, views among them.
    """

    flops: int = 0
    nbytes: int = 0
    ops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.nbytes + other.nbytes, self.ops + other.ops)


@dataclass(frozen=True)
class Span:
    """What is computed between two moments.

    Attributes:
        work: of it.
        peak: most bytes held in it: activations, and gradients of parameters until they are taken.
        held: bytes held at its end.
    """

    work: Work = field(default_factory=Work)
    peak: int = 0
    held: int = 0


class Moment(Enum):
    """When fully_shard acts."""

    ENTER = auto()
    LEAVE = auto()
    ENTER_BACKWARD = auto()
    LEAVE_BACKWARD = auto()


@dataclass(frozen=True)
class Mark:
    """A moment of one unit, and what was computed since the one before."""

    moment: Moment
    unit: int
    before: Span


def traced(units: Sequence[Unit], forward: Forward, mp_policy: MixedPrecisionPolicy) -> list[Mark]:
    """Runs a step of a copy of the model, and notes what happens when.

    A model on meta runs on fake tensors of the CPU, where nothing is computed; any other really.

    Args:
        units: the model's first.
        forward: calls the model that it is given, and returns a loss.
        mp_policy: what parameters and inputs are cast to.

    Raises:
        ValueError: forward does not give a loss.
    """
    model = units[0].modules[0]
    on_meta = any(param.device.type == "meta" for param in model.parameters())
    fake: AbstractContextManager[Any] = (
        FakeTensorMode(allow_non_fake_inputs=True) if on_meta else nullcontext()
    )
    with fake:
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = _copied(tensor, mp_policy)
        copied = copy.deepcopy(model, memo)
        recorder = Recorder(copied)
        places = {id(module): name for name, module in model.named_modules()}
        for number, unit in enumerate(units):
            modules = tuple(copied.get_submodule(places[id(module)]) for module in unit.modules)
            params = [memo[id(one.param)] for one in unit.found]
            recorder.watch(number, modules, params, mp_policy)
        with recorder:
            loss: Any = forward(copied)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    f"simulate: forward returned {type(loss).__name__}; wants the loss, a tensor "
                    f"of one element that backward can begin from"
                )
            loss.backward()
            recorder.end()
    return recorder.marks


def assumed(units: Sequence[Unit], activations: int, tokens: int) -> list[Mark]:
    """What a step is if nothing but sizes is known: units in order, backward in reverse.

    Args:
        units: the model's first.
        activations: bytes that forward keeps for backward, as much in each unit but the model.
        tokens: of a rank in a step: 2 flops for each parameter in forward, 4 in backward.
    """
    inner = range(1, len(units)) or range(1)
    each, held = activations // len(inner), 0
    sizes = [sum(one.param.numel() for one in unit.found) for unit in units]
    grads = [
        sum(one.param.nbytes for one in unit.found if one.param.requires_grad) for unit in units
    ]
    marks = [Mark(Moment.ENTER, 0, Span())]
    for unit in inner:
        work = Work(2 * tokens * sizes[unit])
        if unit:
            marks.append(Mark(Moment.ENTER, unit, Span(held=held, peak=held)))
        held += each
        if unit:
            marks.append(Mark(Moment.LEAVE, unit, Span(work, held, held)))
    root = Work(2 * tokens * sizes[0])
    marks.append(Mark(Moment.LEAVE, 0, Span(root, held, held)))
    marks.append(Mark(Moment.ENTER_BACKWARD, 0, Span(Work(), held, held)))
    for unit in reversed(range(1, len(units))):
        marks.append(Mark(Moment.ENTER_BACKWARD, unit, Span(Work(), held, held)))
        peak, held = held + grads[unit], held - each
        after = Span(Work(4 * tokens * sizes[unit]), peak, held + grads[unit])
        marks.append(Mark(Moment.LEAVE_BACKWARD, unit, after))
    after = Span(Work(4 * tokens * sizes[0]), held + grads[0], grads[0])
    return [*marks, Mark(Moment.LEAVE_BACKWARD, 0, after)]


class Recorder(TorchDispatchMode):
    """Notes work and memory of all operators, and the moments of units.

    Args:
        model: whose parameters and buffers do not count as memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks: list[Mark] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        for tensor in (*model.parameters(), *model.buffers()):
            self._known.add(tensor.untyped_storage())
        self._work, self._live, self._peak = Work(), 0, 0
        self._open: dict[int, list[nn.Parameter]] = {}  # of the units that backward has not left
        self._entered: set[int] = set()  # units that backward has entered

    def watch(
        self,
        number: int,
        modules: tuple[nn.Module, ...],
        params: list[nn.Parameter],
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        """Notes the moments of a unit, at the hooks of fully_shard."""
        self._open[number] = params

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            wanted = mp_policy.param_dtype if mp_policy.cast_forward_inputs else None
            given = hooks.cast(args, wanted), hooks.cast(kwargs, wanted)
            if hooks.in_backward():  # activation checkpointing computes anew
                return given
            self.mark(Moment.ENTER, number)
            return hooks.after_backward(given, left)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if not hooks.in_backward():
                self.mark(Moment.LEAVE, number)
                hooks.before_backward(output, entered)
            return hooks.cast(output, mp_policy.output_dtype)

        def entered() -> None:
            if number not in self._entered:  # by the first of several outputs
                self._entered.add(number)
                self.mark(Moment.ENTER_BACKWARD, number)

        def left() -> None:
            self._leave_backward(number)

        hooks.on_group(modules, enter, leave, set(), lambda output: output)

    def mark(self, moment: Moment, unit: int) -> None:
        """Ends a span."""
        self.marks.append(Mark(moment, unit, Span(self._work, self._peak, self._live)))
        self._work, self._peak = Work(), self._live

    def end(self) -> None:
        """Leaves the units whose inputs had no gradients, as the end of backward does."""
        for number in list(self._open):
            self._leave_backward(number)

    def _leave_backward(self, number: int) -> None:
        self.mark(Moment.LEAVE_BACKWARD, number)
        for param in self._open.pop(number):
            param.grad = None
        self._peak = self._live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self.call(func, args, kwargs or {})
        self._work += work_of(func, args, kwargs or {}, out)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self._live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self._peak = max(self._peak, self._live)
        return out

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator."""
        return func(*args, **kwargs)

    def _free(self, nbytes: int) -> None:
        self._live -= nbytes


def work_of(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Work:
    """Of one operator."""
    count = _FLOPS.get(func._overloadpacket)
    if count is not None:
        return Work(int(count(*args, **kwargs, out_val=out)), 0, 1)
    if func.is_view:
        return Work(ops=1)
    tensors = {id(tensor): tensor for tensor in _tensors((args, kwargs, out))}
    return Work(0, sum(tensor.nbytes for tensor in tensors.values()), 1)


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Of rows by one matrix for each expert: as of all rows by one."""
    return 2 * a.numel() * b.shape[-1]


def _attention_flops(query: torch.Tensor, key: torch.Tensor, products: int) -> int:
    """Of so many products of as many rows as queries by as many as keys."""
    return 2 * products * query.numel() * key.shape[-2]


_FLOPS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    torch.ops.aten._grouped_mm: _grouped_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *args, **kwargs: _attention_flops(q, k, 2)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *args, **kwargs: _attention_flops(q, k, 5)
    ),
}


def _copied(tensor: torch.Tensor, mp_policy: MixedPrecisionPolicy) -> torch.Tensor:
    """A parameter as it is computed with, or a buffer."""
    is_param, dtype = isinstance(tensor, nn.Parameter), tensor.dtype
    if isinstance(tensor, nn.Parameter):
        dtype = dtypes_of(dtype, _compat.policy_of(tensor, mp_policy)).compute
    if tensor.device.type == "meta":
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    else:
        made = tensor.detach().to(dtype, copy=True)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_param else made


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
