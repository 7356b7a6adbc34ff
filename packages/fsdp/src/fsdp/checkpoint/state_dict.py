"""State dicts: they have the sharded parameters, whatever the modules have at the moment."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.param_group import FSDPParamGroup, PlannedParamGroup

__all__ = ["register_state_dict_hooks"]


def register_state_dict_hooks(group: FSDPParamGroup) -> None:
    """Reshards a group before its modules save or load, and resets parameters after loading."""
    views: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()

    def reshard(*args: Any, **kwargs: Any) -> None:
        group.reshard()

    def reset(module: nn.Module, incompatible: Any) -> None:
        group.reset_sharded_params()

    def replace(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for param in group.params:
            for location in param.locations:
                tensor = state.get(key := prefix + location.name)
                is_param = isinstance(tensor, nn.Parameter)  # keep_vars=True: the parameter itself
                if location.module is module and isinstance(tensor, DTensor) and not is_param:
                    state[key] = _with_own_storage(location.get(), views)

    for module in {location.module for param in group.params for location in param.locations}:
        module.register_state_dict_pre_hook(reshard)
        if isinstance(group, PlannedParamGroup):
            module.register_state_dict_post_hook(replace)
        module.register_load_state_dict_pre_hook(reshard)
        module.register_load_state_dict_post_hook(reset)


def _with_own_storage(param: Any, views: MutableMapping[torch.Tensor, torch.Tensor]) -> DTensor:
    """Returns the parameter detached, its local tensor a storage of its own in the same memory.

    Parameters of a group share a storage. `torch.save` would write all of it for each of them,
    transformers takes those of one size for tied (pytorch_utils.id_tensor_storage), and
    `dcp.async_save`'s stager takes an offset for an address (_state_dict_stager.py).

    Args:
        param: in a group's buffer.
        views: earlier results by local tensor: the stager recognizes storages that it has seen.
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
