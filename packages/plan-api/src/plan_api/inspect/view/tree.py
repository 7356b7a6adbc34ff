"""Builds the tree that the page shows: a model's modules, with the plan and a step's communication.

Note: a *node* is a module, or several equal neighbours: same tensors, steps, children and
communication, as in a stack of layers. Communication is counted per module, children included; what
belongs to no module (reductions of a bucket of gradients, the loss, the optimizer) is counted for
the full step only.
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

__all__ = ["Communication", "ModuleNode", "ShownStep", "ShownTensor", "build_tree"]


@dataclass(frozen=True)
class Communication:
    """The collectives of a step on this rank: their number and their bytes."""

    number: int = 0
    bytes: int = 0

    def __add__(self, other: Communication) -> Communication:
        return Communication(self.number + other.number, self.bytes + other.bytes)

    def times(self, number: int) -> Communication:
        """Returns the sum over equal modules."""
        return Communication(number * self.number, number * self.bytes)


@dataclass(frozen=True)
class ShownTensor:
    """A parameter or buffer.

    Attributes:
        name: in its module.
        placements: a formatted placement per axis of the mesh.
        shape: of the global tensor.
        local_shape: of the local tensor on this rank.
        itemsize: bytes of an element.
        dtype: as in ``float32``.
        tied_to: the first name of a tied tensor; "" if this is the first.
        lines: of the plan.
        is_buffer: whether it is a buffer.
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
        """The bytes of the global tensor."""
        return torch.Size(self.shape).numel() * self.itemsize

    @property
    def local_bytes(self) -> int:
        """The bytes of the local tensor on this rank."""
        return torch.Size(self.local_shape).numel() * self.itemsize


@dataclass(frozen=True)
class ShownStep:
    """What the plan does with one tensor at a site.

    Attributes:
        tensor: ``<in>:0``, ``<out>:loss``.
        kind: of operation, such as ``redist`` or ``annotate``.
        before: a formatted placement per axis of the mesh; "" where the plan does not say it.
        after: the placements afterwards.
        lines: of the plan.
    """

    tensor: str
    kind: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class ModuleNode:
    """One module, or several equal neighbours.

    Attributes:
        paths: of the modules, in order.
        name: in the parent module; "" if that is a number.
        kind: their class.
        tensors: parameters and buffers of each.
        steps: of the plan, in each.
        own: the communication of each, without children.
        children: of each.
    """

    paths: tuple[str, ...] = field(compare=False)
    name: str
    kind: str
    tensors: tuple[ShownTensor, ...]
    steps: tuple[ShownStep, ...]
    own: Communication
    children: tuple[ModuleNode, ...]

    @property
    def total(self) -> Communication:
        """The communication of each, children included."""
        return sum((child.total.times(len(child.paths)) for child in self.children), self.own)

    @property
    def all_tensors(self) -> Iterator[ShownTensor]:
        """The tensors of one module and of all in it; tied ones once."""
        yield from (tensor for tensor in self.tensors if not tensor.tied_to)
        for child in self.children:
            for _ in child.paths:
                yield from child.all_tensors


def build_tree(plan: Plan, model: nn.Module, record: Record | None) -> ModuleNode:
    """Builds the tree of a model.

    Args:
        plan: any plan.
        model: on any device, ``meta`` included, before `parallelize` or after.
        record: of a step.

    Raises:
        ValueError: the plan does not fit the model.
    """
    return _branch("", model, _ModelReader(plan, model, record))


class _ModelReader:
    """Collects the tensors, steps and communication of each module."""

    def __init__(self, plan: Plan, model: nn.Module, record: Record | None) -> None:
        self._plan = plan
        self._first_names: dict[int, str] = {}  # by tensor
        for name, tensor in named_state(model):
            self._first_names.setdefault(id(tensor), name)
        self._sites: dict[str, list[Site]] = {}
        lowered = lower(plan, model, mode="static")  # which takes what Eager takes, and more
        self._schedules = lowered.schedules
        for site in lowered.sites:
            if site.hook_point is not HookPoint.INIT:
                self._sites.setdefault(site.path, []).append(site)
        self._communication: dict[str, Communication] = {}
        for one in record.collectives if record is not None else ():
            if one.site is not None:
                self._communication[one.site] = self.communication(one.site) + Communication(
                    1, one.bytes
                )

    def communication(self, path: str) -> Communication:
        return self._communication.get(path, Communication())

    def tensors(self, path: str, module: nn.Module) -> Iterator[ShownTensor]:
        for tensors, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield self._tensor(_join(path, name), name, tensor, is_buffer)

    def steps(self, path: str) -> Iterator[ShownStep]:
        hook_points = list(HookPoint)
        for site in sorted(
            self._sites.get(path, ()), key=lambda one: hook_points.index(one.hook_point)
        ):
            for step in site.steps:
                where = (
                    f" at {site.hook_point.value}" if site.hook_point.is_phase else f":{step.index}"
                )
                yield ShownStep(
                    f"{step.tensor}{where}", step.kind.value,
                    self._placements(step, "src"), self._placements(step, "dst"),
                    self._lines(step.entries),
                )  # fmt: skip

    def _tensor(self, full: str, name: str, tensor: torch.Tensor, is_buffer: bool) -> ShownTensor:
        first = self._first_names[id(tensor)]
        schedule = self._schedules.get(first)
        placements = (Replicate(),) * self._plan.mesh.ndim if schedule is None else schedule.rest
        if isinstance(tensor, DTensor) and tensor.device_mesh == self._plan.mesh:
            placements = tensor.placements
        return ShownTensor(
            name, tuple(map(format_placement, placements)), tuple(tensor.shape),
            tuple(local_shape(tensor, self._plan.mesh, placements)), tensor.element_size(),
            str(tensor.dtype).removeprefix("torch."), "" if first == full else first,
            () if schedule is None else self._lines(schedule.entries), is_buffer,
        )  # fmt: skip

    def _placements(self, step: SiteStep, end: str) -> tuple[str, ...]:
        ends = (getattr(step.moves.get(axis), end, None) for axis in self._plan.axes)
        return tuple("" if end is None else format_placement(end) for end in ends)

    def _lines(self, numbers: Iterable[int]) -> tuple[str, ...]:
        entries = self._plan.entries
        return tuple(dict.fromkeys(entries[number].line for number in numbers))


def _branch(path: str, module: nn.Module, reader: _ModelReader) -> ModuleNode:
    children = [_branch(_join(path, name), one, reader) for name, one in module.named_children()]
    name = path.rpartition(".")[2]
    return ModuleNode(
        (path,), "" if name.isdecimal() else name, type(module).__name__,
        tuple(reader.tensors(path, module)), tuple(reader.steps(path)), reader.communication(path),
        tuple(_merge_equal(children)),
    )  # fmt: skip


def _merge_equal(children: Iterable[ModuleNode]) -> Iterator[ModuleNode]:
    """Merges equal neighbours whose names are numbers."""
    for _, group in groupby(children):
        equal = list(group)
        if equal[0].name:
            yield from equal
        else:
            yield replace(equal[0], paths=tuple(path for one in equal for path in one.paths))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
