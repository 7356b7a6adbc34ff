"""The parameters that one call of fully_shard manages, and the tensors that each of them has.

Note: FSDP tensors. Names say the stage that a tensor is in.
    original parameter: as the module had it when fully_shard was called.
    sharded parameter: a DTensor placed by RaggedShard, in the SHARD buffer of its group; under DDP
        a replicated one. Modules have it between steps; optimizers, clipping and checkpoints use
        it.
    unsharded parameter: an ordinary tensor of the compute dtype, in the all-gather buffer of its
        group; a DTensor where the original parameter is one, except with ``grad_placements_fn``.
        Forward and backward use it. The object stays the same; its storage is freed and
        allocated again.
    unsharded gradient: ``unsharded_param.grad``; it is copied into the group's gradient buffer,
        reduced there, and its shard becomes ``sharded_param.grad``.
    parameter group: the parameters of one call with one mesh, one dtype, all trained or all frozen:
        one layout, one all-gather and one reduce-scatter; see param_group.py.
    state: what is known of the modules of one call, their groups included; see state.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp._compat import GradDtype, grad_dtype_of, placement_and_mesh, set_grad_dtype
from fsdp.mesh import (
    ParamPlacement,
    SpmdMesh,
    annotation_of,
    block_on_inner_axes,
    checked_mesh,
    placement_of,
    spec_with_dtype,
)
from fsdp.mesh.granularity import Whole, block_size
from fsdp.quantized.arguments import (
    checked_block,
    checked_operand,
    checked_tiles,
)
from fsdp.quantized.operands import OperandFormat
from fsdp.quantized.tiles import Tiles

__all__ = [
    "RELEASE_HOOK",
    "FSDPParam",
    "NamedParam",
    "ParamLocation",
    "chunk_rows",
    "describe",
    "has_extension",
    "managed_modules",
    "managed_params",
    "mark_stale",
    "move_buffers",
    "move_params",
    "named_params",
    "param_names",
    "stale_name",
]

_STALE = "_fsdp_name"  # attribute of a tensor that optimizers must not have: its parameter's name
_EXTENSION_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
RELEASE_HOOK = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def mark_stale(param: torch.Tensor, name: str) -> None:
    """Marks an original or unsharded parameter: optimizers have to use the sharded one."""
    setattr(param, _STALE, name)


def stale_name(param: torch.Tensor) -> str | None:
    """Returns the name of a parameter that `mark_stale` has marked; None for others."""
    name: str | None = getattr(param, _STALE, None)
    return name


@dataclass(frozen=True, eq=False)
class ParamLocation:
    """A module, and the name of a parameter that is registered on it."""

    module: nn.Module
    name: str

    def get(self) -> nn.Parameter | None:
        """Returns the parameter that is registered now."""
        return self.module._parameters.get(self.name)

    def set(self, param: nn.Parameter) -> None:
        """Registers a parameter, through the module's own ``__setattr__`` where it has one."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = param
        else:
            setattr(self.module, self.name, param)


@dataclass(eq=False)
class FSDPParam:
    """One parameter; tied parameters are one.

    Attributes:
        name: from the root once that is known, until then from the module that was sharded.
        original: the original parameter; None once the sharded one replaces it.
        locations: all modules that have it.
        block: elements that are not split.
        mesh: of one axis, or of two for HSDP, that it is sharded over; None where it is only
            planned.
        placement: of a DTensor; None for plain tensors.
        tiles: as which it is quantized for its all-gather; None if it is not.
        operand: the format of the operand as which it is gathered; None if it is not.
        extension: whether it has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.
        whole: the granularity, if that is `Whole`.
        sharded_param: DTensor, of the original dtype, in the SHARD buffer.
        unsharded_param: of the compute dtype, in the all-gather buffer; None before the first
            all-gather.
        grad_dtype: what ``grad_dtype`` of the original or sharded parameter was set to; None if it
            was not (collectives/grad_dtype.py).
        unsharded_grad_dtype: to which autograd casts unsharded gradients; None does not cast.
        follows_grad: whether unsharded gradients are reduced in the dtype that they have.
    """

    name: str
    original: nn.Parameter | None
    locations: Sequence[ParamLocation]
    block: int
    mesh: DeviceMesh | None
    placement: ParamPlacement | None = None
    tiles: Tiles | None = None
    extension: bool = False
    whole: Whole | None = None
    operand: OperandFormat | None = None
    sharded_param: nn.Parameter = field(init=False)
    unsharded_param: nn.Parameter | None = None
    grad_dtype: GradDtype | None = None
    unsharded_grad_dtype: torch.dtype | None = None
    follows_grad: bool = False

    @property
    def orig_param(self) -> nn.Parameter:
        """The original parameter, before a group replaces it."""
        assert self.original is not None, "a group has replaced it"
        return self.original

    @property
    def gathered_as(self) -> Tiles | OperandFormat | None:
        """The form in which it is quantized for its all-gather; None if it is not."""
        return self.tiles if self.operand is None else self.operand

    def describe_form(self) -> str:
        """Returns, for the comparison of ranks, the form in which it is gathered."""
        return "" if self.gathered_as is None else f", {self.name!r} in {self.gathered_as}"

    @property
    def is_annotated(self) -> bool:
        """Whether it is a plain tensor that spmd_types annotates."""
        return self.placement is not None and self.placement.annotation is not None

    def restore_annotation(self) -> None:
        """Annotates the unsharded parameter as the original one was."""
        if self.placement is not None and self.placement.annotation is not None:
            assert self.unsharded_param is not None
            self.placement.annotation.restore(self.unsharded_param)

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """As `local_shape`, also once the sharded parameter has replaced the original one."""
        if self.placement is not None:
            return self.placement.shape
        return tuple(self.sharded_param.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part of the unsharded parameter; the largest of all ranks."""
        return tuple(self.orig_param.shape) if self.placement is None else self.placement.shape

    def local_tensor(self) -> torch.Tensor:
        """Returns this rank's part of the original parameter, gathered along the axes of FSDP."""
        param = self.orig_param.detach()
        if self.placement is None or not isinstance(param, DTensor):
            return param
        return param.redistribute(placements=self.placement.spec.placements).to_local()

    def set_on_modules(self, param: nn.Parameter) -> None:
        """Registers a parameter at all locations."""
        for location in self.locations:
            location.set(param)

    def registered_dtensor(self) -> Any:
        """Returns what the locations have: if some differ from the sharded parameter, the first.

        Raises:
            RuntimeError: it is no DTensor with the placements of the sharded parameter.
        """
        params: list[Any] = [location.get() for location in self.locations]
        param = next((param for param in params if param is not self.sharded_param), params[0])
        sharded_param: Any = self.sharded_param
        if not isinstance(param, DTensor) or param.placements != sharded_param.placements:
            raise RuntimeError(
                f"fsdp: parameter {self.name!r} was replaced after fully_shard, by "
                f"{describe(param)}; expected a DTensor placed as before: change values in place, "
                f"or replace it before fully_shard"
            )
        return param

    def is_registered(self, param: object) -> bool:
        """Returns whether all locations have a parameter."""
        return all(location.get() is param for location in self.locations)

    def init_sharded_param(self, param: nn.Parameter) -> None:
        """Makes a DTensor the sharded parameter, and registers it."""
        self.keep_grad_dtype(param)
        self.sharded_param, self.original = param, None
        self.set_on_modules(param)

    def keep_grad_dtype(self, param: torch.Tensor) -> None:
        """Reads ``grad_dtype`` of a sharded parameter, or sets it to what it was before.

        Casts and ``load_state_dict(assign=True)`` register parameters without one.
        """
        self.grad_dtype = grad_dtype_of(param) or self.grad_dtype
        if self.grad_dtype is not None:
            set_grad_dtype(param, self.grad_dtype.dtype)

    def init_unsharded_param(self, tensor: torch.Tensor) -> None:
        """Makes the unsharded parameter from a tensor in memory that all-gathers fill."""
        if self.placement is not None and self.placement.grad_spec is None:
            spec = spec_with_dtype(self.placement.spec, tensor.dtype)
            tensor = DTensor(tensor, spec, requires_grad=False)
        self.unsharded_param = nn.Parameter(tensor, requires_grad=self.sharded_param.requires_grad)
        set_grad_dtype(self.unsharded_param, self.unsharded_grad_dtype)
        mark_stale(self.unsharded_param, self.name)

    def set_unsharded_grad_dtype(self, dtype: torch.dtype | None) -> None:
        """Sets to which dtype autograd casts unsharded gradients; None does not cast."""
        self.unsharded_grad_dtype = dtype
        if self.unsharded_param is not None:
            set_grad_dtype(self.unsharded_param, dtype)

    def sync_requires_grad(self) -> None:
        """Makes the unsharded parameter trained or frozen, as the sharded one is now."""
        assert self.unsharded_param is not None
        if self.unsharded_param.requires_grad != self.sharded_param.requires_grad:
            self.unsharded_param.requires_grad_(self.sharded_param.requires_grad)


def describe(value: object) -> str:
    """Returns a short description of a value that replaces a parameter, for errors."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    return repr(value)


def param_names(params: Sequence[FSDPParam]) -> str:
    """Returns the names of parameters for errors, at most four of them."""
    shown = ", ".join(repr(p.name) for p in params[:4])
    return shown + (f" and {len(params) - 4} more" if len(params) > 4 else "")


# Which modules and parameters a call manages.


def managed_modules(
    roots: Sequence[nn.Module], is_managed: Callable[[nn.Module], bool]
) -> dict[nn.Module, str]:
    """Returns the modules whose parameters a call manages, and their names.

    Args:
        roots: of the call.
        is_managed: whether another call manages a module, and so all modules below it.
    """
    found: dict[nn.Module, str] = {}
    for number, root in enumerate(roots):
        prefix = f"{number}" if len(roots) > 1 else ""
        for name, module in _walk(root, prefix, is_managed):
            found.setdefault(module, name)
    return found


def _walk(
    module: nn.Module, name: str, is_managed: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    if is_managed(module):
        return
    yield name, module
    for key, child in module.named_children():
        yield from _walk(child, f"{name}.{key}" if name else key, is_managed)


@dataclass(frozen=True, eq=False)
class NamedParam:
    """A parameter of some modules with its first name; tied parameters are one."""

    name: str
    param: nn.Parameter
    locations: list[ParamLocation]


def named_params(
    modules: dict[nn.Module, str], ignored: Collection[nn.Parameter]
) -> list[NamedParam]:
    """Returns the parameters of modules, in their order, without the ignored ones."""
    skip = {id(param) for param in ignored}
    found: dict[int, NamedParam] = {}
    for module, prefix in modules.items():
        for key, param in module._parameters.items():
            if param is None or id(param) in skip:
                continue
            name = f"{prefix}.{key}" if prefix else key
            one = found.setdefault(id(param), NamedParam(name, param, []))
            one.locations.append(ParamLocation(module, key))
    return list(found.values())


def managed_params(
    modules: dict[nn.Module, str],
    mesh: DeviceMesh,
    device: torch.device,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    quantize_fn: Callable[[nn.Parameter], Any] | None,
    grad_placements_fn: Callable[[nn.Parameter], Any] | None,
    ignored: Collection[nn.Parameter],
    spmd_mesh: SpmdMesh | None = None,
) -> list[FSDPParam]:
    """Checks the parameters of modules, and returns them; nothing is changed.

    Raises:
        ValueError: a parameter belongs to another group already, or cannot be quantized; what a
            ``shard_placement_fn`` returned is no granularity, splits tiles, or splits the equal
            chunks of a tensor with ``fsdp_pre_all_gather``; a ``grad_placements_fn`` returned
            placements for a parameter that is no DTensor, or that its gradient cannot have.
    """
    return [
        _managed_param(
            named_param,
            mesh,
            device,
            shard_placement_fn,
            quantize_fn,
            grad_placements_fn,
            spmd_mesh,
        )
        for named_param in named_params(modules, ignored)
    ]


def _managed_param(
    named: NamedParam,
    mesh: DeviceMesh,
    device: torch.device,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    quantize_fn: Callable[[nn.Parameter], Any] | None,
    grad_placements_fn: Callable[[nn.Parameter], Any] | None,
    spmd_mesh: SpmdMesh | None,
) -> FSDPParam:
    name, param = named.name, named.param
    managed_name = stale_name(param)
    if managed_name is not None:
        raise ValueError(
            f"fully_shard: parameter {name!r} is tied to {managed_name!r}, which is already "
            f"managed by another FSDP group; shard both in one call, "
            f"fully_shard([module_a, module_b])"
        )
    returned = shard_placement_fn(param) if shard_placement_fn is not None else None
    granularity, param_mesh = placement_and_mesh(returned, mesh, name)
    checked_mesh(param_mesh)
    _check_device(param, device, name)
    extension = has_extension(param, name)
    placement = None
    annotation = annotation_of(param, name, spmd_mesh)
    if annotation is not None:
        placement = placement_of(annotation.dtensor(param), param_mesh, name)
        placement = placement.annotated(annotation)
    elif isinstance(param, DTensor):
        placement = placement_of(param, param_mesh, name)
        if extension:
            _check_axes_of_extension(placement, name)
    grad_placements = grad_placements_fn(param) if grad_placements_fn is not None else None
    if grad_placements is not None:
        if placement is None or annotation is not None:
            raise ValueError(
                f"fully_shard: grad_placements_fn: expected None for parameter {name!r}, which is "
                f"no DTensor, got {grad_placements}"
            )
        placement = placement.with_local_grads(grad_placements, name)
    shape = tuple(param.shape) if placement is None else placement.shape
    block = block_size(granularity, shape, name)
    quantized = quantize_fn(param) if quantize_fn is not None else None
    tiles = operand = None
    if isinstance(quantized, OperandFormat):
        operand = checked_operand(quantized, param, placement, name, extension=extension)
        block = checked_block(operand, granularity, block, shape, name)
    else:
        tiles = checked_tiles(quantized, param, placement, name, extension=extension)
        if tiles is not None:
            block = checked_block(tiles, granularity, block, shape, name)
    if placement is not None:
        block = block_on_inner_axes(placement, block)
    whole = granularity if isinstance(granularity, Whole) else None
    made = FSDPParam(
        name, param, named.locations, block, param_mesh, placement, tiles,
        extension=extension, whole=whole, operand=operand, grad_dtype=grad_dtype_of(param),
    )  # fmt: skip
    if extension:
        _check_chunks(made, param_mesh, granularity)
    return made


def move_params(params: Sequence[FSDPParam], device: torch.device) -> None:
    """Moves original parameters to the device, and marks them as replaced."""
    for param in params:
        if not _is_on(param.orig_param, device):
            param.orig_param.data = param.orig_param.data.to(device)
        mark_stale(param.orig_param, param.name)


def move_buffers(modules: dict[nn.Module, str], device: torch.device) -> None:
    """Moves the modules' buffers to the device, except for those on meta."""
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and buffer.device.type != "meta" and buffer.device != device:
                buffer.data = buffer.data.to(device)


def _is_on(param: nn.Parameter, device: torch.device) -> bool:
    return param.device.type == "meta" or param.device == device


def _check_device(param: nn.Parameter, device: torch.device, name: str) -> None:
    if isinstance(param, DTensor) and not _is_on(param, device):
        raise ValueError(
            f"fully_shard requires DTensor to have mesh of the same type as the FSDP mesh: "
            f"parameter {name!r} is on {param.device} and the mesh of {device}"
        )


# Tensors with fsdp_pre_all_gather and fsdp_post_all_gather.


def has_extension(param: torch.Tensor, name: str) -> bool:
    """Returns whether a parameter has hooks that define what is gathered (extensions.py).

    Raises:
        ValueError: it has one of the two hooks, or `RELEASE_HOOK` alone; or it has no dim to
            shard.
    """
    local = param._local_tensor if isinstance(param, DTensor) else param
    has = [hasattr(local, hook) for hook in _EXTENSION_HOOKS]
    kind = type(local).__name__
    if not any(has):
        if hasattr(local, RELEASE_HOOK):
            raise ValueError(
                f"fully_shard: parameter {name!r} is a {kind} with {RELEASE_HOOK}, which requires "
                f"{_EXTENSION_HOOKS[0]} and {_EXTENSION_HOOKS[1]}, got neither"
            )
        return False
    if not all(has):
        raise ValueError(
            f"fully_shard: parameter {name!r} is a {kind} with {_EXTENSION_HOOKS[has.index(True)]} "
            f"and without {_EXTENSION_HOOKS[has.index(False)]}; expected both"
        )
    if param.ndim == 0:
        raise ValueError(
            f"fully_shard: parameter {name!r} is a {kind} and a scalar; expected a tensor that can "
            f"be sharded along dim 0"
        )
    return True


def _check_axes_of_extension(placement: ParamPlacement, name: str) -> None:
    """Refuses a DTensor whose chunks along dim 0 are not those of FSDP2.

    Raises:
        ValueError: naming the parameter.
    """
    inner, found = placement.inner, None
    if placement.fsdp_axes:
        found = "a DTensor on the axes of fully_shard"
    elif placement.is_uneven:
        found = "a DTensor of which other axes have parts of different sizes"
    elif inner is not None and (inner.mesh.mesh_dim_names or ())[-len(inner.placements) :] != (
        placement.spec.mesh.mesh_dim_names
    ):
        found = "a DTensor on axes that are not the last of the mesh"
    if found is not None:
        raise ValueError(
            f"fully_shard: expected a parameter with fsdp_pre_all_gather to be a plain tensor, or "
            f"a DTensor with equal parts on the last axes of the mesh, got {name!r}, {found}"
        )


def chunk_rows(rows: int, ranks: int, rank: int) -> int:
    """Returns how many rows `torch.chunk` gives a rank; 0 where there are fewer chunks."""
    size = -(-rows // ranks)
    return max(0, min(size, rows - rank * size))


def _check_chunks(param: FSDPParam, mesh: DeviceMesh, granularity: object) -> None:
    """Refuses a granularity that the equal chunks of an extension's dim 0 would split.

    Raises:
        ValueError: naming the parameter.
    """
    ranks = mesh.size(mesh.ndim - 1)
    rows = chunk_rows(param.local_shape[0], ranks, 0)
    chunk = rows * math.prod(param.local_shape[1:])
    if chunk % param.block:
        raise ValueError(
            f"fully_shard: shard_placement_fn: expected None or Shard(0) for parameter "
            f"{param.name!r}, a {type(param.orig_param.data).__name__} with fsdp_pre_all_gather, "
            f"which is sharded into equal chunks, got {granularity!r} for chunks of {rows} rows of "
            f"{tuple(param.local_shape)}"
        )
