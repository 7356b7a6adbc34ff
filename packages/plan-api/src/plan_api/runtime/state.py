"""Makes the parameters and buffers of a model DTensors, on the device of their mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.fully_shard import entry_for
from plan_api.lowering.ir import FullyShard, Schedule
from plan_api.lowering.model_names import named_state
from plan_api.runtime.deferred_init import tape_of
from plan_api.runtime.local_shards import redistribute_compact
from plan_api.runtime.unsharded_param import UnshardedParam, install_unsharded_params
from plan_api.spec.axes import axis_names

__all__ = ["check_device", "place_state", "use_unsharded_params"]


def check_device(mesh: DeviceMesh, model: nn.Module) -> None:
    """Checks that a model can be placed on a mesh, and that the mesh's ranks can communicate.

    Tensors on the CPU and the meta device are moved to the mesh's device, as `distribute_tensor`
    does; those of an accelerator would leave it for another device.

    Args:
        mesh: of the plan.
        model: which is to be parallelized.

    Raises:
        ValueError: a tensor of the model is on an accelerator that is not the mesh's device, or
            the process groups have no backend for the mesh's device.
    """
    expected = mesh.device_type
    for name, _, _, tensor in _slots(model):
        if tensor.device.type not in ("cpu", "meta", expected):
            raise ValueError(
                f"parallelize: expected a model on {expected!r}, the device of the mesh, or on the "
                f"CPU, from where it is moved there, got {name!r} on {str(tensor.device)!r}; call "
                f"model.to({expected!r}), or init_device_mesh({tensor.device.type!r}, ...)"
            )
    for axis in range(mesh.ndim):
        try:
            mesh.get_group(axis)._get_backend(torch.device(expected))
        except RuntimeError as error:
            raise ValueError(
                f"parallelize: the process group of axis {axis} has no backend for {expected!r}, "
                f"the device of the mesh; call init_process_group without backend, or with one for "
                f"each device, as in 'cpu:gloo,cuda:nccl'"
            ) from error


def place_state(
    model: nn.Module,
    mesh: DeviceMesh,
    schedules: Mapping[str, Schedule],
    fully_sharded: Mapping[str, FullyShard],
    src_data_rank: int | None,
    random_shards: bool = False,
) -> None:
    """Makes every parameter and buffer a DTensor; a tied one, under all its names.

    Args:
        model: is changed in place.
        mesh: of the DTensors.
        schedules: by name; tensors without one are replicated.
        fully_sharded: modules that fully_shard will be applied to; their parameters in a model of
            `deferred_init` are made as shards at once.
        src_data_rank: as in `distribute_tensor`; unused for a model of `deferred_init`.
        random_shards: for such a model; see `Tape.replay`.
    """
    slots = [slot for slot in _slots(model) if not isinstance(slot[-1], DTensor)]
    targets: dict[int, tuple[torch.Tensor, tuple[Placement, ...]]] = {}
    tape = tape_of(model)
    for name, _, _, tensor in slots:  # the schedule of a tied tensor is under its first name
        schedule = schedules.get(name)
        rest = (Replicate(),) * mesh.ndim if schedule is None else schedule.rest
        if tape is not None:
            rest = _placements_before_fully_shard(name, tensor, rest, fully_sharded, mesh)
        targets.setdefault(id(tensor), (tensor, rest))
    if tape is None:
        placed = [_distributed(one, mesh, rest, src_data_rank) for one, rest in targets.values()]
    else:
        placed = tape.replay(list(targets.values()), mesh, random_shards)
    replacements = {
        id(old): nn.Parameter(new, requires_grad=old.requires_grad)
        if isinstance(old, nn.Parameter)
        else new
        for (old, _), new in zip(targets.values(), placed, strict=True)
    }
    for _, module, own, tensor in slots:
        registry = module._parameters if own in module._parameters else module._buffers
        registry[own] = replacements[id(tensor)]  # type: ignore[assignment]


def use_unsharded_params(
    model: nn.Module,
    schedules: Mapping[str, Schedule],
    make: Callable[[nn.Module, str, Schedule], UnshardedParam] = UnshardedParam,
) -> list[RemovableHandle]:
    """Makes modules use unsharded parameters where these have phases.

    Args:
        model: its parameters are DTensors.
        schedules: of parameters, by their first names.
        make: makes the unsharded parameter of a module's parameter of a name, as `UnshardedParam`.
    """
    unsharded: dict[int, UnshardedParam] = {}
    by_module: dict[nn.Module, dict[str, UnshardedParam]] = {}
    for name, module, own, tensor in _slots(model):
        schedule = schedules.get(name)
        if schedule is not None and schedule.has_phases:
            unsharded[id(tensor)] = make(module, own, schedule)
        if id(tensor) in unsharded:
            by_module.setdefault(module, {})[own] = unsharded[id(tensor)]
    return [
        handle
        for module, params in by_module.items()
        for handle in install_unsharded_params(module, params)
    ]


def _slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yields each parameter and buffer with its full name, its module and its name there."""
    for name, tensor in named_state(model):
        path, _, own = name.rpartition(".")
        yield name, model.get_submodule(path), own, tensor


def _distributed(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    src_data_rank: int | None,
) -> torch.Tensor:
    # A strided shard subdivides a shard that all ranks of its axis have.
    shards = [Replicate() if isinstance(p, _StridedShard) else p for p in placements]
    placed = distribute_tensor(tensor.detach(), mesh, shards, src_data_rank=src_data_rank)
    return redistribute_compact(placed, placements)


def _placements_before_fully_shard(
    name: str,
    tensor: torch.Tensor,
    rest: tuple[Placement, ...],
    entries: Mapping[str, FullyShard],
    mesh: DeviceMesh,
) -> tuple[Placement, ...]:
    """Returns the placements to materialise a parameter that fully_shard will shard.

    Along the axes that will shard it, the parameter is sharded on a dim that no other axis shards,
    so that no rank holds all of it; if there is no such dim it is replicated. These are all axes of
    the entry where it flattens them, and otherwise the last one.

    Args:
        name: of the parameter.
        tensor: the parameter, whose shape counts.
        rest: its placements at rest, replicated along the entry's axes.
        entries: of fully_shard, by module path.
        mesh: of the plan.
    """
    entry = entry_for(name, entries)
    if entry is None or not isinstance(tensor, nn.Parameter):
        return rest
    axes = [axis_names(mesh).index(axis) for axis in entry.axes]
    if not all(isinstance(rest[axis], Replicate) for axis in axes):
        return rest  # fully_shard ignores it
    sharding = axes if dict(entry.options).get("flat") else axes[-1:]
    # Modules would find shards along an axis of one rank, where fully_shard does not gather along
    # it: of HSDP's two axes it does not know which axes of the plan they are, but by their ranks.
    sharding = [axis for axis in sharding if mesh.size(axis) > 1]
    sharded_dims = {getattr(one, "dim", None) for one in rest}  # torch's and ragged-shard's shards
    free = [dim for dim in range(tensor.ndim) if dim not in sharded_dims]
    if not free:
        return rest
    return tuple(Shard(free[0]) if axis in sharding else one for axis, one in enumerate(rest))
