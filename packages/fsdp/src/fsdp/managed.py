"""Which modules and parameters a call of fully_shard manages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp._compat import placement_and_mesh
from fsdp.chunks import chunk_rows
from fsdp.extension import is_extension
from fsdp.inner import inner_block, placed_of
from fsdp.meshes import checked_mesh
from fsdp.optimizers import mark_stale, stale_name
from fsdp.parameter import ManagedParameter, Place
from fsdp.policy import Whole, block_size
from fsdp.quantized.choice import checked_block, checked_tiles
from fsdp.state import state_of

__all__ = [
    "Found",
    "found_parameters",
    "managed_modules",
    "managed_parameters",
    "move_buffers",
    "sharded_before",
    "take",
]


@dataclass(frozen=True, eq=False)
class Found:
    """A parameter of some modules, tied ones once: its first name, and all that hold it."""

    name: str
    param: nn.Parameter
    places: list[Place]


def sharded_before(module: nn.Module) -> bool:
    """Whether an earlier call has the module."""
    return state_of(module) is not None


def managed_modules(
    roots: Sequence[nn.Module], taken: Callable[[nn.Module], bool] = sharded_before
) -> dict[nn.Module, str]:
    """The modules whose parameters a call manages, and their names.

    Args:
        roots: of the call.
        taken: whether another call has a module, and what is in it.
    """
    found: dict[nn.Module, str] = {}
    for number, root in enumerate(roots):
        prefix = f"{number}" if len(roots) > 1 else ""
        for name, module in _walk(root, prefix, taken, root=True):
            found.setdefault(module, name)
    return found


def _walk(
    module: nn.Module, name: str, taken: Callable[[nn.Module], bool], *, root: bool
) -> Iterator[tuple[str, nn.Module]]:
    if not root and taken(module):
        return
    yield name, module
    for key, child in module.named_children():
        yield from _walk(child, f"{name}.{key}" if name else key, taken, root=False)


def found_parameters(
    modules: dict[nn.Module, str], ignored: Collection[nn.Parameter]
) -> list[Found]:
    """The parameters of modules, in their order."""
    skip = {id(param) for param in ignored}
    found: dict[int, Found] = {}
    for module, prefix in modules.items():
        for key, param in module._parameters.items():
            if param is None or id(param) in skip:
                continue
            name = f"{prefix}.{key}" if prefix else key
            found.setdefault(id(param), Found(name, param, [])).places.append(Place(module, key))
    return list(found.values())


def managed_parameters(
    modules: dict[nn.Module, str],
    mesh: DeviceMesh,
    device: torch.device,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    quantize_fn: Callable[[nn.Parameter], Any] | None,
    ignored: Collection[nn.Parameter],
) -> list[ManagedParameter]:
    """The parameters of modules, tied ones once, as they are: `take` moves them.

    Raises:
        ValueError: one belongs to another group already; a granularity that is none, that cuts
            tiles, or that equal chunks of dim 0 do not keep; one cannot be quantised.
    """
    managed = []
    for one in found_parameters(modules, ignored):
        name, param = one.name, one.param
        taken = stale_name(param)
        if taken is not None:
            raise ValueError(
                f"fully_shard: parameter {name!r} is tied to {taken!r}, which another call has "
                f"sharded; shard both in one call, fully_shard([module_a, module_b])"
            )
        chosen = shard_placement_fn(param) if shard_placement_fn is not None else None
        granularity, its_mesh = placement_and_mesh(chosen, mesh, name)
        checked_mesh(its_mesh)
        _check_device(param, device, name)
        extension = is_extension(param, name)
        placed = None
        if isinstance(param, DTensor) and not extension:
            placed = placed_of(param, its_mesh, name)
        shape = tuple(param.shape) if placed is None else placed.shape
        block = block_size(granularity, shape, name)
        quantised = quantize_fn(param) if quantize_fn is not None else None
        tiles = checked_tiles(quantised, param, placed, name)
        if tiles is not None:
            block = checked_block(tiles, granularity, block, shape, name)
        if placed is not None:
            block = inner_block(placed, block)
        whole = granularity if isinstance(granularity, Whole) else None
        made = ManagedParameter(
            name, param, one.places, block, its_mesh, placed, tiles,
            extension=extension, whole=whole,
        )  # fmt: skip
        if extension:
            _check_chunks(made, its_mesh, granularity)
        managed.append(made)
    return managed


def take(managed: Sequence[ManagedParameter], device: torch.device) -> None:
    """Moves parameters to the device, and marks them as sharded: there is no way back."""
    for made in managed:
        if not _is_there(made.given, device):
            made.given.data = made.given.data.to(device)
        mark_stale(made.given, made.name)


def move_buffers(modules: dict[nn.Module, str], device: torch.device) -> None:
    """Moves the modules' buffers to the device, but for those on meta."""
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and buffer.device.type != "meta" and buffer.device != device:
                buffer.data = buffer.data.to(device)


def _check_chunks(param: ManagedParameter, mesh: DeviceMesh, granularity: object) -> None:
    """Refuses a granularity that the equal chunks of an extension's dim 0 do not keep.

    Raises:
        ValueError: naming the parameter.
    """
    ranks = mesh.size(mesh.ndim - 1)
    rows = chunk_rows(param.shape[0], ranks, 0)
    chunk = rows * math.prod(param.shape[1:])
    if chunk % param.block:
        raise ValueError(
            f"fully_shard: shard_placement_fn: expected None or Shard(0) for parameter "
            f"{param.name!r}, a {type(param.given.data).__name__} that says itself what is "
            f"gathered of it and is sharded into equal chunks, got {granularity!r} for chunks of "
            f"{rows} rows of {tuple(param.shape)}"
        )


def _is_there(param: nn.Parameter, device: torch.device) -> bool:
    return param.device.type == "meta" or param.device == device


def _check_device(param: nn.Parameter, device: torch.device, name: str) -> None:
    if isinstance(param, DTensor) and not _is_there(param, device):
        raise ValueError(
            f"fully_shard: parameter {name!r} is a DTensor on {param.device} and the mesh of "
            f"{device}; wants both on one kind of device"
        )
