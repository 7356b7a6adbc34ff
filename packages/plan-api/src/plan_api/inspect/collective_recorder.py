"""Records what a step sends along each axis of a mesh, and compares two steps by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from plan_api.inspect.collectives import (
    axis_label,
    collective_name,
    get_process_group,
    payload_bytes,
    real_tensors,
)
from plan_api.inspect.sites import SiteTracker
from plan_api.runtime.attribution import is_preparing

__all__ = ["CollectiveDifference", "SentCollective", "compare_collectives", "recorded_collectives"]

_SUBCLASSES = (DTensor, AsyncCollectiveTensor)  # they dispatch the collectives that are recorded


@dataclass(frozen=True)
class SentCollective:
    """One collective of a step.

    Attributes:
        name: as in ``all_gather``, the same for all overloads.
        axis: of the mesh, by name; of several that form one group ``dp+tp``; "" for another group.
        bytes: the larger of its input and its output on this rank.
        site: the path of the innermost module, "" for the model; in backward the module whose
            forward created the autograd node; None where it is unknown.
        in_backward: whether autograd's backward sends it.
    """

    name: str
    axis: str
    bytes: int
    site: str | None
    in_backward: bool


@dataclass(frozen=True)
class CollectiveDifference:
    """A kind of collective of which two steps send other numbers or bytes along an axis.

    Attributes:
        name: as in `SentCollective`, like `axis`.
        axis: of the mesh.
        expected: the bytes of each that the first step sends.
        actual: the bytes of each that the second step sends.
        first: the first that only the second step sends there, or else only the first step.
    """

    name: str
    axis: str
    expected: tuple[int, ...]
    actual: tuple[int, ...]
    first: SentCollective


@contextmanager
def recorded_collectives(model: nn.Module, mesh: DeviceMesh) -> Iterator[list[SentCollective]]:
    """Records the collectives inside of the block, in their order; FakeTensors send none.

    Args:
        model: whose modules are the sites.
        mesh: whose axes are named.

    Yields:
        the list to which they are added.
    """
    mode = _RecordingMode(model, mesh)
    handles: list[RemovableHandle] = []
    for path, module in model.named_modules():  # each once, by its first name
        handles += mode.hooks(path, module)
    try:
        with mode:
            yield mode.sent
    finally:
        for handle in handles:
            handle.remove()


def compare_collectives(
    expected: Sequence[SentCollective], actual: Sequence[SentCollective]
) -> Iterator[CollectiveDifference]:
    """Finds the kinds of which two steps send other numbers or bytes along an axis.

    Args:
        expected: of the first step.
        actual: of the second step.
    """
    kinds = dict.fromkeys((one.axis, one.name) for one in (*expected, *actual))
    for axis, name in kinds:
        of_kind = [
            [one for one in step if (one.axis, one.name) == (axis, name)]
            for step in (expected, actual)
        ]
        sizes = [tuple(one.bytes for one in step) for step in of_kind]
        if sorted(sizes[0]) != sorted(sizes[1]):
            yield CollectiveDifference(name, axis, sizes[0], sizes[1], _first_only_in_one(*of_kind))


def _first_only_in_one(
    expected: Sequence[SentCollective], actual: Sequence[SentCollective]
) -> SentCollective:
    """Returns the first that only the second step sends there, or else only the first step."""
    for step, other in ((actual, expected), (expected, actual)):
        remaining = Counter(other)
        for one in step:
            if not remaining[one]:
                return one
            remaining[one] -= 1
    raise AssertionError("equal collectives")


class _RecordingMode(TorchDispatchMode):
    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[SentCollective] = []
        self._mesh, self._sites = mesh, SiteTracker(model)
        self._axes: dict[str, str] = {}  # by name of a group

    def hooks(self, path: str, module: nn.Module) -> Iterator[RemovableHandle]:
        """Registers hooks around those of the plan, and yields their handles."""
        depths: list[int] = []

        def enter(*_: object) -> None:
            depths.append(self._sites.depth)
            self._sites.enter(path)

        def leave(*_: object) -> None:
            if depths:  # not if a hook before `enter` raised
                self._sites.leave(depths.pop())

        yield module.register_forward_pre_hook(enter, prepend=True)
        yield module.register_forward_hook(leave, always_call=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(one, _SUBCLASSES) for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = collective_name(func)
        group = get_process_group(func, args) if name and real_tensors(args) else None
        if group is not None and not is_preparing():
            in_backward = torch._C._current_graph_task_id() != -1
            self.sent.append(
                SentCollective(
                    name, self._axis(group), payload_bytes(args, result),
                    self._sites.current().site, in_backward,
                )
            )  # fmt: skip
        return result

    def _axis(self, group: dist.ProcessGroup) -> str:
        name = group.group_name
        if name not in self._axes:
            self._axes[name] = axis_label(group, self._mesh)
        return self._axes[name]
