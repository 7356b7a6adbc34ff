"""Parameters and buffers become DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.resolve import state_of
from plan_api.lowering.schedule import Schedule
from plan_api.runtime.deferred_init import tape_of
from plan_api.runtime.fully_shard import placed_until_sharded
from plan_api.runtime.shapes import cut
from plan_api.runtime.unsharded_param import Copy, install_copies
from plan_api.spec.entry import Entry

__all__ = ["place_state", "use_copies"]


def place_state(
    model: nn.Module,
    mesh: DeviceMesh,
    schedules: Mapping[str, Schedule],
    fully_sharded: Mapping[str, Entry],
    src_data_rank: int | None,
    random_shards: bool = False,
) -> None:
    """Every parameter and buffer becomes a DTensor at rest; a tied one, under all its names.

    Args:
        model: is changed in place.
        mesh: of the DTensors.
        schedules: by name; what has none is replicated.
        fully_sharded: what will be sharded further, whose parameters of a model of `deferred_init`
            are therefore made sharded.
        src_data_rank: as in `distribute_tensor`; nothing is sent of a model of `deferred_init`.
        random_shards: of such a model; see `Tape.replay`.
    """
    places = [place for place in _places(model) if not isinstance(place[-1], DTensor)]
    wanted: dict[int, tuple[torch.Tensor, tuple[Placement, ...]]] = {}
    tape = tape_of(model)
    for name, _, _, tensor in places:  # a tied tensor's schedule is under its first name
        schedule = schedules.get(name)
        rest = (Replicate(),) * mesh.ndim if schedule is None else schedule.rest
        if tape is not None:
            rest = placed_until_sharded(name, tensor, rest, fully_sharded, mesh)
        wanted.setdefault(id(tensor), (tensor, rest))
    if tape is None:
        placed = [_placed(one, mesh, rest, src_data_rank) for one, rest in wanted.values()]
    else:
        placed = tape.replay(list(wanted.values()), mesh, random_shards)
    made = {
        id(old): nn.Parameter(new, requires_grad=old.requires_grad)
        if isinstance(old, nn.Parameter)
        else new
        for (old, _), new in zip(wanted.values(), placed, strict=True)
    }
    for _, module, own, tensor in places:
        registry = module._parameters if own in module._parameters else module._buffers
        registry[own] = made[id(tensor)]  # type: ignore[assignment]


def use_copies(model: nn.Module, schedules: Mapping[str, Schedule]) -> list[RemovableHandle]:
    """Makes modules use copies of the parameters that rest otherwise than they run."""
    copies: dict[int, Copy] = {}
    of_module: dict[nn.Module, dict[str, Copy]] = {}
    for name, module, own, tensor in _places(model):
        schedule = schedules.get(name)
        if schedule is not None and schedule.moves:
            copies[id(tensor)] = Copy(module, own, schedule)
        if id(tensor) in copies:
            of_module.setdefault(module, {})[own] = copies[id(tensor)]
    return [handle for module, used in of_module.items() for handle in install_copies(module, used)]


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for name, tensor in state_of(model):
        path, _, own = name.rpartition(".")
        yield name, model.get_submodule(path), own, tensor


def _placed(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    src_data_rank: int | None,
) -> torch.Tensor:
    # A piece of a shard is cut from the shard, where all its ranks have it.
    shards = [Replicate() if isinstance(p, _StridedShard) else p for p in placements]
    placed = distribute_tensor(tensor.detach(), mesh, shards, src_data_rank=src_data_rank)
    return cut(placed, placements)
