"""A model's modules with what a plan says of them, and what a step sent: what the page shows.

Note: a *branch* is a module, or several side by side that are alike: same tensors, moves,
children and communication. Those of a stack of layers so become one. *Traffic* is counted per
module and summed upwards; what belongs to no module (the reduction of gradients in buckets, what
the loss and the optimizer do) is counted for the whole step only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from plan_api.inspect.track import Record
from plan_api.lowering.ir import HookPoint, Site, SiteStep
from plan_api.lowering.lower import lower
from plan_api.lowering.model_names import named_state
from plan_api.plan import Plan
from plan_api.runtime.local_shards import local_shape
from plan_api.spec.placements import format_placement

__all__ = ["Branch", "Move", "State", "Traffic", "tree_of"]


@dataclass(frozen=True)
class Traffic:
    """Collectives of a step on this rank.

    Attributes:
        number: of them.
        bytes: of them.
    """

    number: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.number + other.number, self.bytes + other.bytes)

    def times(self, number: int) -> Traffic:
        """That of so many modules alike."""
        return Traffic(number * self.number, number * self.bytes)


@dataclass(frozen=True)
class State:
    """A parameter or buffer.

    Attributes:
        name: in its module.
        placements: per axis of the mesh, in short.
        shape: of the whole tensor.
        local_shape: on this rank.
        itemsize: bytes of an element.
        dtype: as in ``float32``.
        tied_to: the name under which it was first, "" if that is this.
        lines: of the plan.
        is_buffer: whether it is no parameter.
    """

    name: str
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    itemsize: int
    dtype: str
    tied_to: str
    lines: tuple[str, ...]
    is_buffer: bool

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return torch.Size(self.shape).numel() * self.itemsize

    @property
    def local_bytes(self) -> int:
        """On this rank."""
        return torch.Size(self.local_shape).numel() * self.itemsize


@dataclass(frozen=True)
class Move:
    """What a site does with one tensor.

    Attributes:
        tensor: ``<in>:0``, ``<out>:loss``.
        kind: ``redist`` or ``annotate``.
        before: per axis of the mesh, in short; "" where the plan does not say.
        after: the same.
        lines: of the plan.
    """

    tensor: str
    kind: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Branch:
    """One module, or several alike.

    Attributes:
        paths: theirs, in order.
        name: in the module above; "" if that is a number.
        kind: their class.
        states: parameters and buffers of each.
        moves: of each.
        own: what each sends itself.
        children: of each.
    """

    paths: tuple[str, ...] = field(compare=False)
    name: str
    kind: str
    states: tuple[State, ...]
    moves: tuple[Move, ...]
    own: Traffic
    children: tuple[Branch, ...]

    @property
    def total(self) -> Traffic:
        """What each sends, with its children."""
        return sum((one.total.times(len(one.paths)) for one in self.children), self.own)

    @property
    def all_states(self) -> Iterator[State]:
        """Those of one and of its children, each as often as it is there; tied ones once."""
        yield from (one for one in self.states if not one.tied_to)
        for child in self.children:
            for _ in child.paths:
                yield from child.all_states


def tree_of(plan: Plan, model: nn.Module, record: Record | None) -> Branch:
    """The model as branches.

    Args:
        plan: any.
        model: on any device, ``meta`` included, before `parallelize` or after.
        record: of a step.

    Raises:
        ValueError: the plan does not fit the model.
    """
    return _branch("", model, _Reader(plan, model, record))


class _Reader:
    """What is known of each module."""

    def __init__(self, plan: Plan, model: nn.Module, record: Record | None) -> None:
        self._plan = plan
        self._first: dict[int, str] = {}  # of the names of a tied tensor
        for name, tensor in named_state(model):
            self._first.setdefault(id(tensor), name)
        self._sites: dict[str, list[Site]] = {}
        lowered = lower(plan, model)
        self._schedules = lowered.schedules
        for site in lowered.sites:
            if site.hook_point is not HookPoint.INIT:
                self._sites.setdefault(site.path, []).append(site)
        self._sent: dict[str, Traffic] = {}
        for one in record.collectives if record is not None else ():
            if one.site is not None:
                self._sent[one.site] = self.sent(one.site) + Traffic(1, one.bytes)

    def sent(self, path: str) -> Traffic:
        return self._sent.get(path, Traffic())

    def states(self, path: str, module: nn.Module) -> Iterator[State]:
        for tensors, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield self._state(_join(path, name), name, tensor, is_buffer)

    def moves(self, path: str) -> Iterator[Move]:
        moments = list(HookPoint)
        for site in sorted(
            self._sites.get(path, ()), key=lambda one: moments.index(one.hook_point)
        ):
            for step in site.steps:
                where = (
                    f" at {site.hook_point.value}" if site.hook_point.is_phase else f":{step.index}"
                )
                yield Move(
                    f"{step.tensor}{where}", step.kind.value,
                    self._along(step, "src"), self._along(step, "dst"), self._lines(step.entries),
                )  # fmt: skip

    def _state(self, full: str, name: str, tensor: torch.Tensor, is_buffer: bool) -> State:
        first = self._first[id(tensor)]
        schedule = self._schedules.get(first)
        placements = (Replicate(),) * self._plan.mesh.ndim if schedule is None else schedule.rest
        if isinstance(tensor, DTensor) and tensor.device_mesh == self._plan.mesh:
            placements = tensor.placements
        return State(
            name, tuple(map(format_placement, placements)), tuple(tensor.shape),
            tuple(local_shape(tensor, self._plan.mesh, placements)), tensor.element_size(),
            str(tensor.dtype).removeprefix("torch."), "" if first == full else first,
            () if schedule is None else self._lines(schedule.entries), is_buffer,
        )  # fmt: skip

    def _along(self, step: SiteStep, end: str) -> tuple[str, ...]:
        ends = (getattr(step.moves.get(axis), end, None) for axis in self._plan.axes)
        return tuple("" if one is None else format_placement(one) for one in ends)

    def _lines(self, numbers: Iterable[int]) -> tuple[str, ...]:
        entries = self._plan.entries
        return tuple(dict.fromkeys(entries[number].line for number in numbers))


def _branch(path: str, module: nn.Module, reader: _Reader) -> Branch:
    children = [_branch(_join(path, name), one, reader) for name, one in module.named_children()]
    name = path.rpartition(".")[2]
    return Branch(
        (path,), "" if name.isdecimal() else name, type(module).__name__,
        tuple(reader.states(path, module)), tuple(reader.moves(path)), reader.sent(path),
        tuple(_together(children)),
    )  # fmt: skip


def _together(children: Iterable[Branch]) -> Iterator[Branch]:
    """Numbered neighbours that are alike become one."""
    for _, alike in groupby(children):
        same = list(alike)
        if same[0].name:
            yield from same
        else:
            yield replace(same[0], paths=tuple(path for one in same for path in one.paths))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
