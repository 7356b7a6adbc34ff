"""State dicts have the sharded parameters, whatever the modules have at the moment."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.group import Group
from fsdp.planned import PlannedGroup

__all__ = ["register_state_dict_hooks"]


def register_state_dict_hooks(group: Group) -> None:
    """Reshards a group before its modules save or load, and adopts what was loaded."""

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
                    state[key] = _at_no_offset(tensor)

    for module in {place.module for param in group.params for place in param.places}:
        module.register_state_dict_pre_hook(before)
        if isinstance(group, PlannedGroup):
            module.register_state_dict_post_hook(saved)
        module.register_load_state_dict_pre_hook(before)
        module.register_load_state_dict_post_hook(after)


def _at_no_offset(tensor: Any) -> DTensor:
    """The DTensor as an object that says of itself that it begins where its storage does.

    Of a local tensor inside of a buffer it would say otherwise, and `dcp.async_save`'s stager takes
    an address that is not 0 for that of an ordinary tensor (_state_dict_stager.py).
    """
    local = tensor._local_tensor
    shown: Any = DTensor(local.new_empty(()).expand(local.shape), tensor._spec, requires_grad=False)
    shown._local_tensor = local
    return shown  # type: ignore[no-any-return]
