"""State dicts have the sharded parameters, whatever the modules have at the moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from fsdp.group import Group

__all__ = ["register_state_dict_hooks"]


def register_state_dict_hooks(group: Group) -> None:
    """Reshards a group before its modules save or load, and adopts what was loaded."""

    def before(*args: Any, **kwargs: Any) -> None:
        group.reshard()

    def after(module: nn.Module, incompatible: Any) -> None:
        group.adopt()

    for module in {place.module for param in group.params for place in param.places}:
        module.register_state_dict_pre_hook(before)
        module.register_load_state_dict_pre_hook(before)
        module.register_load_state_dict_post_hook(after)
