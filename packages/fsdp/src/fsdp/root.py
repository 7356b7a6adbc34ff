"""The first forward: which module is the root, what is below it, and how all is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from dbuffer import verify

if TYPE_CHECKING:
    from fsdp.state import State

__all__ = ["become_root"]


def become_root(root: State) -> None:
    """Makes a state the root of all that are below it, which then share its context.

    Raises:
        RuntimeError: a module below ran first; several modules at once cannot be the root;
            parameters were replaced since.
    """
    from fsdp.state import state_of

    if len(root.modules) > 1:
        raise RuntimeError(
            f"fsdp: {len(root.modules)} modules that were sharded as one ran before any module "
            f"that holds them; call fully_shard on the model too, and run that"
        )
    module = root.modules[0]
    states: list[State] = []
    for name, child in module.named_modules():
        state = state_of(child)
        if state is None or state in states:
            continue
        if state is not root and state.is_root is not None:
            raise RuntimeError(
                f"fsdp: {name!r} ran forward before the module that holds it; run the root first"
            )
        state.is_root, state.name = state is root, name
        states.append(state)
    context = root.context
    context.all_states = states
    for state in states:
        state.context = context
        for group in state.groups:
            group.streams = context.streams
    if root.auto_reshard:
        for group in root.groups:
            group.reshard_after_forward = False
    _give_names(module, states)
    for state in states:
        for group in state.groups:
            if not group.unsharded:
                group.adopt()
    _verify(states)


def _verify(states: list[State]) -> None:
    """Compares the plans of all ranks by hash, once.

    Raises:
        ValueError: on every rank, where two differ.
    """
    shards = [group.shard for state in states for group in state.groups]
    for mesh in dict.fromkeys(shard.mesh for shard in shards):
        verify([shard for shard in shards if shard.mesh == mesh])


def _give_names(root: nn.Module, states: list[State]) -> None:
    """Gives parameters the names that the root knows them by, for errors."""
    names = {id(module): name for name, module in root.named_modules()}
    for state in states:
        for group in state.groups:
            for param in group.params:
                place = param.places[0]
                prefix = names.get(id(place.module))
                if prefix is not None:
                    param.name = f"{prefix}.{place.key}" if prefix else place.key
