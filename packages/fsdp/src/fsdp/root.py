"""The first forward: which module is the root, what is below it, and how all is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from dbuffer import verify

if TYPE_CHECKING:
    from fsdp.group import Group
    from fsdp.state import State

__all__ = ["become_root"]


def become_root(root: State) -> None:
    """Makes a state the root of all that are below it, which then share its context.

    Raises:
        RuntimeError: a module below ran first; several modules at once cannot be the root;
            parameters were replaced since.
        ValueError: a setting of the root was changed on a module below; ranks differ.
    """
    from fsdp.state import state_of

    if len(root.modules) > 1:
        raise RuntimeError(
            f"fsdp: {len(root.modules)} modules that were sharded as one ran before any module "
            f"that holds them; call fully_shard on the model too, and run that"
        )
    module = root.modules[0]
    for name, child in module.named_modules():
        state = state_of(child)
        if state is not None and state is not root:
            _check_settings(name, state, root)
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
    context.most_in_flight = max(state.context.most_in_flight for state in states)
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


def _check_settings(name: str, state: State, root: State) -> None:
    """Refuses settings of a module below the root that the root alone has.

    Raises:
        ValueError: naming the module and the method.
    """
    here, there = state.context, root.context
    for method, changed in (
        ("set_is_last_backward", there.is_last_backward and not here.is_last_backward),
        ("set_manual_backward_finalization", here.ends_by_hand and not there.ends_by_hand),
        ("set_post_optim_event", here.post_optim_event not in (None, there.post_optim_event)),
    ):
        if changed:
            raise ValueError(
                f"{method}: expected the root, got {name!r}, which is below it; call it on the "
                f"module whose forward runs first"
            )


def _verify(states: list[State]) -> None:
    """Compares the plans of all ranks by hash, once.

    Raises:
        ValueError: on every rank, where two differ.
    """
    groups = [group for state in states for group in state.groups]
    for mesh in dict.fromkeys(group.mesh for group in groups):
        here = [group for group in groups if group.mesh == mesh]
        verify(
            [group.shard for group in here],
            names=[_tensor_names(group) for group in here],
            options=[_options(group) for group in here],
        )


def _tensor_names(group: Group) -> list[str]:
    """Of the tensors in a group's buffer: its parameters, of extensions once for each rank."""
    times = len(group.shard.layout.specs) // len(group.params)
    return [param.name for param in group.params] * times


def _options(group: Group) -> str:
    """What of a group decides which collectives it issues, beside its buffer."""
    trained = any(param.sharded.requires_grad for param in group.params)
    return (
        f"gathered in {group.compute_dtype}, reduced in {group.reduce_dtype}, "
        f"{'trained' if trained else 'frozen'}, "
        f"reshard_after_forward={group.reshard_after_forward}"
        + "".join(f", {p.name!r} in {p.tiles}" for p in group.params if p.tiles is not None)
    )


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
