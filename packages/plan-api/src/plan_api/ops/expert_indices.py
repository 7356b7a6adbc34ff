"""Makes a module with sharded experts run on this rank's experts.

A module that loops over its experts finds them by number. Where experts are sharded along an axis,
and the module runs on local tensors, the numbers have to become those of this rank's shard: 0 up to
its size. For experts of other ranks the number is the size itself, which modules skip that support
expert parallelism, as transformers' do; or the tokens that chose them are sent to the ranks that
have them (`plan_api.ops.expert_dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import ExpertIndices
from plan_api.ops.expert_dispatch import OverlappedModule, TokenDispatcher
from plan_api.ops.routers.capacity import has_expert_capacity
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.hooks import get_argument, register_always_called, replace_argument

__all__ = ["install_expert_indices", "renumber"]


def renumber(
    indices: ExpertIndices, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces the expert numbers in a module's arguments by those of this rank's shard.

    Raises:
        ValueError: the argument is no tensor of integers.
    """
    own, name = indices.own, indices.argument[1]

    def renumbered(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(
                f"{name}: expected a tensor of integers, which number the experts, got "
                f"{tensor.dtype}; name the argument that has them in index()"
            )
        is_own = (tensor >= own.start) & (tensor < own.stop)
        return torch.where(is_own, tensor - own.start, len(own))

    argument = map_tensors(get_argument(indices.argument, args, kwargs), renumbered)
    return replace_argument(indices.argument, args, kwargs, argument)


def install_expert_indices(
    model: nn.Module, indices: Sequence[ExpertIndices], mesh: DeviceMesh, path: str
) -> list[RemovableHandle]:
    """Installs hooks that make a module on local tensors run on this rank's experts.

    They run after the hooks that make its inputs local, and before those that place its outputs.

    Args:
        model: any.
        indices: of the module.
        mesh: of the plan; all its ranks have to call.
        path: of the module in the model.
    """
    module = model.get_submodule(path)
    values = {name: own for index in indices for name, own in index.attributes.items()}
    attributes = _SwappedAttributes(values)
    # Of hooks that are prepended the last one runs first: `combine`, which runs the module again.
    handles = [_after(module, attributes.restore)]
    for one in indices:
        at = StepContext(path or "the model", one.step)
        if one.dispatch is None:
            handles.append(_before(module, at.wrap(_renumber_hook(one))))
            continue
        overlapped, name = None, one.dispatch.overlap
        if name is not None:
            caller = path.rpartition(".")[0]
            overlapped = OverlappedModule(model.get_submodule(caller), name, caller)
            handles += overlapped.install()
        dispatcher = TokenDispatcher(
            one.dispatch, one, mesh, path, overlapped, drops_zeros=has_expert_capacity(model)
        )
        handles += [
            _before(module, at.wrap(dispatcher.dispatch)),
            _after(module, at.wrap(dispatcher.combine)),
        ]
    return [*handles, _before(module, attributes.swap_in)]


def _renumber_hook(indices: ExpertIndices) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return renumber(indices, args, kwargs)

    return hook


def _before(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _after(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    return register_always_called(module, hook, prepend=True)


class _SwappedAttributes:
    """Attributes of a module that have this rank's values while it runs."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._originals: dict[str, Any] = {}

    def swap_in(self, module: nn.Module, *_: Any) -> None:
        for name, value in self._values.items():
            self._originals[name] = getattr(module, name)
            setattr(module, name, value)

    def restore(self, module: nn.Module, *_: Any) -> None:
        while self._originals:
            setattr(module, *self._originals.popitem())
