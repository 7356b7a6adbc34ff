"""State dicts have the sharded parameters, whatever the modules have at the moment."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.group import Group
from fsdp.planned import PlannedGroup

__all__ = ["register_state_dict_hooks"]


def register_state_dict_hooks(group: Group) -> None:
    """Reshards a group before its modules save or load, and adopts what was loaded."""
    views: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()

    def before(*args: Any, **kwargs: Any) -> None:
        group.reshard()

    def after(module: nn.Module, incompatible: Any) -> None:
        group.adopt()

    def saved(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for param in group.params:
            for place in param.places:
                tensor = state.get(key := prefix + place.key)
                keeps = isinstance(tensor, nn.Parameter)  # keep_vars=True: the parameter itself
                if place.module is module and isinstance(tensor, DTensor) and not keeps:
                    state[key] = _with_own_storage(place.get(), views)

    for module in {place.module for param in group.params for place in param.places}:
        module.register_state_dict_pre_hook(before)
        if isinstance(group, PlannedGroup):
            module.register_state_dict_post_hook(saved)
        module.register_load_state_dict_pre_hook(before)
        module.register_load_state_dict_post_hook(after)


def _with_own_storage(param: Any, views: MutableMapping[torch.Tensor, torch.Tensor]) -> DTensor:
    """The parameter detached, with a local tensor in the same memory that has its own storage.

    Parameters of a group share a storage. `torch.save` would write all of it for each of them,
    transformers takes those of one size for tied (pytorch_utils.id_tensor_storage), and
    `dcp.async_save`'s stager takes an offset for an address (_state_dict_stager.py).

    Args:
        param: in a group's buffer.
        views: earlier results by local tensor: the stager knows storages that it has seen.
    """
    local = param._local_tensor
    storage = local.untyped_storage()
    if storage.device.type == "meta":
        return param.detach()  # type: ignore[no-any-return]
    view = views.get(local)
    if view is None:
        begin = local.storage_offset() * local.element_size()
        part = storage[begin : begin + local.nbytes]
        view = local.new_empty(0).set_(part, 0, local.shape, local.stride())
        views[local] = view
    return DTensor(view, param._spec, requires_grad=False)
