"""Tensors that modules create: each rank takes its shard of what one device creates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import OpKind, Site, SiteStep
from plan_api.ops.factories import LIKE_TENSORS, CreateTensor, install_creation
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.local_redistribute import LocalRedistribution, local_redistribution
from plan_api.runtime.local_shards import ShardSizes
from plan_api.spec.axes import axis_names
from plan_api.spec.placements import format_placement
from plan_api.static.redistribute import SiteTypes

__all__ = ["check_factory", "install_factories"]


def check_factory(site: Site, step: SiteStep) -> None:
    """Checks that a rank can take what a step of FACTORY says of a tensor.

    Raises:
        ValueError: the placement is neither Replicate nor Shard.
    """
    for axis, move in step.moves.items():
        if type(move.dst) not in (Replicate, Shard):
            raise ValueError(
                f"{site.name}: expected Shard or Replicate for the tensors that factory() places "
                f"along {axis!r} in static mode, got {format_placement(move.dst)}"
            )


def install_factories(
    model: nn.Module,
    sites: Iterable[Site],
    mesh: DeviceMesh,
    stays: Callable[[str], bool],
    types: SiteTypes | None,
    sizes: ShardSizes,
) -> Iterator[RemovableHandle]:
    """Installs hooks that take shards of the tensors that modules create.

    Args:
        model: in static mode.
        sites: of the plan.
        mesh: of the plan.
        stays: whether the module of a path is an eager fallback.
        types: types the tensors; None: they have none.
        sizes: gets the sizes of uneven shards.
    """
    for site in sites:
        for step in site.steps:
            if step.kind is OpKind.FACTORY and not stays(site.path):
                create = _sharded(site, step, mesh, sizes)
                if types is not None:
                    create = types.operator(site, step, create)
                create = StepContext(site.name, step).wrap(create)
                yield from install_creation(model.get_submodule(site.path), create)


def _sharded(site: Site, step: SiteStep, mesh: DeviceMesh, sizes: ShardSizes) -> CreateTensor:
    axes, what = axis_names(mesh), f"{site.name}: factory"
    shards: list[tuple[int, int, LocalRedistribution]] = []  # axis, dim
    ranks: dict[int, int] = {}  # along sharded dims, if the code passes local sizes
    for axis, move in step.moves.items():
        dim = getattr(move.dst, "dim", None)
        if dim is None:
            continue
        number = axes.index(axis)
        shard = local_redistribution(Replicate(), move.dst, mesh, number, what)
        shards.append((number, dim, shard))
        if dict(move.options).get("sizes") == "local":
            ranks[dim] = ranks.get(dim, 1) * mesh.size(number)

    def create(
        function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        if ranks and function in LIKE_TENSORS:  # of this rank's sizes, without random numbers
            local: torch.Tensor = function(*args, **kwargs)
            return local
        # Created whole, so that random numbers are those of one device.
        arguments = _with_global_sizes(function, args, kwargs, ranks) if ranks else (args, kwargs)
        created: torch.Tensor = function(*arguments[0], **arguments[1])
        if type(created) is not torch.Tensor or created.device.type != mesh.device_type:
            return created
        for axis, dim, shard in shards:
            if dim < created.ndim:
                sizes.shard(axis, dim, created.shape[dim])
                created = shard(created)
        return created

    return create


_OF_SIZES = ("empty", "ones", "rand", "randn", "zeros")  # sizes are all positional arguments
_SIZE_AT = {"full": 0, "randint": -1, "normal": 2}  # a sequence at this place, or ``size``


def _with_global_sizes(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ranks: Mapping[int, int],
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns the arguments of a call with the sizes of sharded dims multiplied by the ranks.

    Raises:
        ValueError: the function takes no sizes.
    """
    name, args, kwargs = function.__name__, [*args], dict(kwargs)

    def widened(size: Sequence[int]) -> tuple[int, ...]:
        return tuple(one * ranks.get(dim, 1) for dim, one in enumerate(size))

    if name == "scalar_tensor" or (name == "tensor" and not hasattr(args[0], "__len__")):
        return args, kwargs  # has no dims
    if name == "arange":
        names = ("end",) if len(args) == 1 else ("start", "end", "step")
        named = {"start": 0, **dict(zip(names, args, strict=False)), **kwargs}
        named["end"] = named["start"] + (named["end"] - named["start"]) * ranks.get(0, 1)
        return [], named
    if name == "randperm":
        return [args[0] * ranks.get(0, 1)], kwargs
    if "size" in kwargs:
        return args, kwargs | {"size": widened(kwargs["size"])}
    if name in _OF_SIZES:
        is_sequence = isinstance(args[0], Sequence)
        return [widened(args[0] if is_sequence else args)], kwargs
    if name in _SIZE_AT and len(args) > _SIZE_AT[name]:
        args[_SIZE_AT[name]] = widened(args[_SIZE_AT[name]])
        return args, kwargs
    raise ValueError(
        f"torch.{name}: expected a function that takes sizes, in a module of "
        f"factory(..., sizes='local'); create the tensor outside of it"
    )
