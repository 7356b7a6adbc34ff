"""`fully_shard` and the other public functions, with the keywords of `torch.distributed.fsdp`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dbuffer import Strategy
from fsdp import _compat
from fsdp._compat import DataParallelMeshDims
from fsdp.checkpoint.state_dict import register_state_dict_hooks
from fsdp.collectives.group_layout import group_params
from fsdp.collectives.narrow import send_dtypes
from fsdp.collectives.resident import count_optimizer_step
from fsdp.mesh import (
    Roles,
    SpmdMesh,
    check_on_spmd_mesh,
    checked_mesh,
    checked_reshard,
    checked_roles,
    data_parallel_mesh,
    device_of,
    post_forward_mesh,
)
from fsdp.mesh.granularity import Granularity
from fsdp.module import FSDPModule, set_fsdp_class, states_of
from fsdp.param import (
    FSDPParam,
    managed_modules,
    managed_params,
    move_buffers,
    move_params,
    stale_name,
)
from fsdp.param_group import (
    ExtensionParamGroup,
    FSDPParamGroup,
    GroupOptions,
    PlannedParamGroup,
)
from fsdp.private_names import is_replicated, register_state
from fsdp.quantized import OperandFormat, Tiles
from fsdp.state import FSDPState, state_of
from fused_comm.narrow_sums import SendDtype

__all__ = [
    "GradPlacementsFn",
    "PlacementFn",
    "QuantizeFn",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "uninstall",
    "watch_optimizers",
]

PlacementFn = Callable[[nn.Parameter], "Granularity | Shard | None"]
QuantizeFn = Callable[[nn.Parameter], "Tiles | OperandFormat | None"]
GradPlacementsFn = Callable[[nn.Parameter], Sequence[Placement] | None]


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    quantize_fn: QuantizeFn | None = ...,
    grad_placements_fn: GradPlacementsFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    placements: Roles | str | None = ...,
    strategy: Strategy = ...,
    send_dtype: SendDtype = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    quantize_fn: QuantizeFn | None = ...,
    grad_placements_fn: GradPlacementsFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    placements: Roles | str | None = ...,
    strategy: Strategy = ...,
    send_dtype: SendDtype = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    quantize_fn: QuantizeFn | None = None,
    grad_placements_fn: GradPlacementsFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # it is frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # as torch's
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    placements: Roles | str | None = None,
    strategy: Strategy = "auto",
    send_dtype: SendDtype = None,
) -> Any:
    """Shards a module's parameters over a mesh, and gathers them for forward and backward.

    Call it on parts of a model first, then on the model: each call manages the parameters that no
    earlier call does, except for those of modules that torch's ``replicate`` manages. They are
    gathered together, in place, and their gradients reduced together. Build the optimizer
    afterwards.

    In torch the first call registers one hook for all optimizers
    (`torch.optim.optimizer.register_optimizer_step_pre_hook`), which raises where one has
    parameters from before they were sharded; `uninstall` removes it. The first `RaggedShard` of a
    process calls `ragged_shard.install`.

    Args:
        module: changed in place; the parameters of several modules are gathered together.
        mesh: of one axis that shards, or of two, (replicate, shard), for HSDP; by default of one
            axis of all ranks.
        reshard_after_forward: whether parameters are freed after forward and gathered again in
            backward. None: those of all modules but the root. A number: they are sharded over so
            many ranks after forward, neighbours in the mesh, and only these gather in backward; it
            must divide the axis that shards. Until backward modules have the sharded parameters;
            this backward does not see changes of them. A number is refused for tensors with
            ``fsdp_pre_all_gather``.
        shard_placement_fn: returns, for a parameter, the run of elements that no rank boundary may
            split: `Rows(n)`, `Block(n)`, `Whole()`; None is ``Block(1)``. torch's ``Shard(0)``
            means slices of dim 0; other dims are refused. torch's ``ShardPlacementResult`` has a
            mesh, too. Tensors with ``fsdp_pre_all_gather`` are sharded into equal chunks of dim 0.
        quantize_fn: returns, for a parameter, the `Tiles` as which it is gathered, one byte per
            element and one scale per tile; None does not quantize it. The sharded parameter stays
            in its dtype, and gets the gradients of the dequantized one. By default no rank boundary
            splits a tile. An `OperandFormat`, such as plan-api's ``GatheredOperand``, gathers the
            weight of a linear layer as what low-precision products take, without dequantizing it.
        grad_placements_fn: returns, for a parameter that is a DTensor, the placements of its
            gradient in backward, one per axis of its mesh: Partial, or the parameter's. Modules
            then compute with the local tensor, as of ``DTensor.to_local(grad_placements=...)``, and
            no operator runs on DTensors; the sharded parameter and its gradient stay DTensors.
            None: modules compute with a DTensor, whose gradient has the placements.
        mp_policy: dtypes of compute, of reductions, and of outputs.
        offload_policy: torch's ``CPUOffloadPolicy()`` keeps shards and gradients on the host.
        ignored_params: parameters that are neither sharded, moved, nor reduced.
        dp_mesh_dims: which axes of `mesh`, of any number of axes, are those of data parallelism:
            its ``shard`` and ``replicate`` name one or several, which are flattened. Parameters
            have to be DTensors on `mesh`, with Replicate along these axes, or annotated by
            spmd_types: plain tensors whose annotation has every other axis. Without ``shard`` they
            stay replicated, and their gradients are reduced, as by DDP. As in FSDP2, gradients are
            averaged over these axes even where they are ``Partial("sum")``, as under a loss that is
            the mean over all ranks; ``set_gradient_divide_factor(1.0)`` sums them.
        placements: of parameters, gradients and optimizer state, each for itself: `Roles`, or the
            name of one of `STRATEGIES`, "ddp", "zero1", "zero2" or "zero3" on a mesh of one axis,
            "hsdp" or "hfsdp" on one of two. By default parameters are placed as by "zero3" and
            "hsdp", and gradients that wait for later microbatches are not reduced, as in FSDP2.
            Parameters that stay unsharded refuse `reshard_after_forward`, `quantize_fn`, and
            tensors with ``fsdp_pre_all_gather``.
        strategy: of the collectives, see `DBuffer`: "auto", "native" or "exchange".
        send_dtype: in which the terms of gradients are sent, where that is narrower than
            ``mp_policy.reduce_dtype``, in which they are added: ``torch.bfloat16``, or a float8
            dtype with a scale for each 128 elements. A mapping has one for some axes of the mesh,
            by name or number, such as that of HSDP's replicas. Each term is rounded once; sums
            over replicas are rounded once more.

    Returns:
        `module`, whose class is a subclass of `FSDPModule` too.

    Raises:
        ValueError: no module, or a ModuleList or ModuleDict without a forward of its own; a wrong
            mesh, granularity, placement or option; a granularity that splits tiles; a parameter
            that another call manages. No parameter was changed then, and nothing was sent.
        AssertionError: a module is sharded already, as torch raises.

    Source: veScale-FSDP, sections 3 and 5; torch/distributed/fsdp/_fully_shard/_fully_shard.py.
    """
    modules = _checked_modules(module)
    _check_options(mp_policy, offload_policy, strategy, ignored_params)
    spmd_mesh, spmd = mesh, None
    if dp_mesh_dims is not None:
        mesh = data_parallel_mesh(mesh, dp_mesh_dims)
        assert spmd_mesh is not None, "data_parallel_mesh checks it"
        spmd = SpmdMesh(spmd_mesh, dp_mesh_dims)
    mesh = checked_mesh(mesh)
    reshard, _ = checked_reshard(reshard_after_forward, mesh.size(mesh.ndim - 1))
    device = device_of(mesh)
    managed = managed_modules(
        modules, lambda child: state_of(child) is not None or is_replicated(child)
    )
    params = managed_params(
        managed, mesh, device, shard_placement_fn, quantize_fn, grad_placements_fn,
        ignored_params or set(), spmd,
    )  # fmt: skip
    _check_send_dtypes(send_dtype, [mesh, *(param.mesh for param in params)])
    if spmd is not None:
        _average_on_spmd_mesh(params, spmd)
    roles = None if placements is None else checked_roles(placements, mesh)
    if roles is not None:
        _check_roles(params, roles, reshard_after_forward)
        reshard = reshard or roles.keeps_parameters
    post_forward_sizes: dict[DeviceMesh | None, int | None] = {}
    if reshard and reshard_after_forward not in (None, True):
        post_forward_sizes = {p.mesh: _post_forward_size(p, reshard_after_forward) for p in params}
    move_params(params, device)
    move_buffers(managed, device)
    options = GroupOptions(device, mp_policy, offload_policy, strategy, roles, send_dtype)
    groups = [
        _make_group(of_group, options, post_forward_sizes)
        for of_group in group_params(params, mp_policy)
    ]
    for group in groups:
        group.reshard_after_forward = reshard
        register_state_dict_hooks(group)
    auto = reshard_after_forward is None
    state = FSDPState(modules, groups, device, mp_policy, auto_reshard=auto)
    for one in modules:
        register_state(one, state)
    set_fsdp_class(modules)
    watch_optimizers()
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes another method gather parameters as forward does.

    Args:
        module: one that `fully_shard` was called on; another one is not changed.
        method_name: of a method that computes with the parameters, such as ``generate``.

    Raises:
        ValueError: the module has no such method.
    """
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(
            f"register_fsdp_forward_method: {type(module).__name__} does not have a method "
            f"{method_name!r}"
        )
    method = getattr(module, method_name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state.pre_forward(module, args, kwargs)
        return state.post_forward(module, args, method(*args, **kwargs))

    setattr(module, method_name, call)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Makes several roots share streams, as the stages of a pipeline on one rank do.

    Raises:
        ValueError: a module was not sharded.
    """
    states = states_of(modules, "share_comm_ctx")
    if not states:
        return
    streams = states[0].context.streams
    sharing = list(dict.fromkeys(one for root in states for one in root.context.sharing))
    for context in sharing:
        context.sharing = sharing
    for root in states:
        root.context.streams = streams
        for state in root.context.all_states or [root]:
            for group in state.groups:
                group.set_streams(streams)


# Arguments.


def _checked_modules(module: object) -> tuple[nn.Module, ...]:
    """Returns the modules of a call, without those that others of them contain.

    Raises:
        ValueError: there are none; the only one is a container without a forward.
        AssertionError: one is sharded already.
    """
    modules = [module] if isinstance(module, nn.Module) else module
    if not isinstance(modules, Sequence) or not modules:
        raise ValueError(f"fully_shard: expected a module, or a list of modules, got {module!r}")
    for one in modules:
        if not isinstance(one, nn.Module):
            raise ValueError(f"fully_shard: expected a list of modules, got {one!r} in it")
    if (
        isinstance(module, nn.ModuleList | nn.ModuleDict)
        and type(module).forward is nn.Module.forward
    ):
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: expected a "
            f"module before whose forward to gather, got a {type(module).__name__}; call it on the "
            f"modules in it, or pass them as one list"
        )
    inner = {id(child) for root in modules for child in root.modules() if child is not root}
    roots = tuple(root for root in dict.fromkeys(modules) if id(root) not in inner)
    for root in roots:
        if state_of(root) is not None:
            raise AssertionError(
                f"fully_shard has already been applied to {type(root).__name__}; call it once"
            )
    return roots


def _check_options(
    mp_policy: object, offload_policy: object, strategy: object, ignored_params: object
) -> None:
    """Checks the options of a call that depend on no other argument.

    Raises:
        ValueError: one has another type or value.
    """
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ValueError(
            f"fully_shard: mp_policy: expected a MixedPrecisionPolicy, got {mp_policy!r}"
        )
    if not isinstance(offload_policy, OffloadPolicy):
        raise ValueError(
            f"fully_shard: offload_policy: expected an OffloadPolicy, got {offload_policy!r}"
        )
    if strategy not in get_args(Strategy):
        raise ValueError(
            f"fully_shard: strategy: expected one of {get_args(Strategy)}, got {strategy!r}"
        )
    if ignored_params is not None and not isinstance(ignored_params, set | frozenset):
        raise ValueError(
            f"fully_shard: ignored_params: expected a set of parameters, got "
            f"{type(ignored_params).__name__}; pass set(...)"
        )


def _check_send_dtypes(send_dtype: SendDtype, meshes: Iterable[DeviceMesh | None]) -> None:
    """Checks the dtypes in which gradients are sent on the meshes of a call's parameters.

    Raises:
        ValueError: one is none of them, or is for an axis that a mesh lacks.
    """
    for mesh in dict.fromkeys(meshes):
        if mesh is not None:
            send_dtypes(send_dtype, mesh)


def _post_forward_size(param: FSDPParam, reshard_after_forward: object) -> int | None:
    """Returns the ranks over which a parameter is sharded after forward; None means all.

    Raises:
        ValueError: the number does not divide those of the parameter's own mesh; it has
            ``fsdp_pre_all_gather``.
    """
    assert param.mesh is not None, "managed_params sets it"
    _, size = checked_reshard(reshard_after_forward, param.mesh.size(param.mesh.ndim - 1))
    if size is not None and param.operand is not None and param.operand.differs_in_backward:
        raise ValueError(
            f"fully_shard: reshard_after_forward: expected True or False for parameter "
            f"{param.name!r} as {param.operand}, of which backward gathers other bytes than "
            f"forward, got {reshard_after_forward}; pass one of these, or no quantize_fn"
        )
    if size is not None and param.extension:
        raise ValueError(
            f"fully_shard: reshard_after_forward: expected True or False for parameter "
            f"{param.name!r}, a tensor with fsdp_pre_all_gather, got {reshard_after_forward}; pass "
            f"one of these, or shard its module in a call of its own"
        )
    return size


def _average_on_spmd_mesh(params: Sequence[FSDPParam], spmd: SpmdMesh) -> None:
    """Checks parameters on a mesh of all parallelism; gradients are averaged, as FSDP2 does.

    Raises:
        ValueError: naming the parameter.
    """
    not_annotated = [(p.name, p.orig_param) for p in params if not p.is_annotated]
    check_on_spmd_mesh(not_annotated, spmd.mesh, spmd.dims)
    for param in params:
        assert param.placement is not None
        param.placement = replace(param.placement, is_averaged=True)


def _check_roles(params: Iterable[FSDPParam], roles: Roles, reshard_after_forward: object) -> None:
    """Refuses parameters that cannot be placed by roles.

    Raises:
        ValueError: naming the parameter.
    """
    for param in params:
        _check_role_of(param, roles, reshard_after_forward)


def _check_role_of(param: FSDPParam, roles: Roles, reshard_after_forward: object) -> None:
    assert param.mesh is not None, "managed_params sets it"
    checked_roles(roles, param.mesh)
    if roles.shards_over_replicas and (
        param.extension or (param.placement is not None and param.placement.inner is not None)
    ):
        kind = "a tensor with fsdp_pre_all_gather" if param.extension else "a DTensor of other axes"
        raise ValueError(
            f"fully_shard: placements: expected a tensor that is no DTensor of other axes and has "
            f"no fsdp_pre_all_gather, for an optimizer state that is sharded over replicas, got "
            f"{param.name!r}, {kind}; pass placements='hsdp', or shard its module in a call of its "
            f"own"
        )
    if not roles.keeps_parameters:
        return
    found = None
    if reshard_after_forward not in (None, False):
        found = f"reshard_after_forward={reshard_after_forward!r}, after which they would not"
    elif param.gathered_as is not None:
        found = "quantize_fn, which quantizes them for each all-gather"
    elif param.extension:
        found = "a tensor with fsdp_pre_all_gather, which makes them in each all-gather"
    if found is not None:
        raise ValueError(
            f"fully_shard: placements: expected parameters that stay unsharded between steps "
            f"({roles}), got {found}: {param.name!r}; leave it out, or pass placements='zero3'"
        )


def _make_group(
    params: Sequence[FSDPParam],
    options: GroupOptions,
    post_forward_sizes: Mapping[DeviceMesh | None, int | None],
) -> FSDPParamGroup:
    """Returns the group of some parameters of one call."""
    first, mesh = params[0], params[0].mesh
    assert mesh is not None, "managed_params sets it"
    policy = _compat.policy_of(first.orig_param, options.mp_policy)
    options = replace(options, mp_policy=policy)
    if first.extension:
        return ExtensionParamGroup(params, mesh, options)
    size = post_forward_sizes.get(mesh)
    smaller = None if size is None else post_forward_mesh(mesh, size)
    return PlannedParamGroup(params, mesh, options, smaller)


# Optimizers that have original parameters would train nothing, without an error.

_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_handle: RemovableHandle | None = None


def watch_optimizers() -> None:
    """Checks every optimizer once, before its first step, and counts all steps."""
    global _handle
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_check_optimizer)


def uninstall() -> None:
    """Removes what `fully_shard` has changed in torch: a hook before optimizers' steps.

    Sharded models stay as they are; the next `fully_shard` registers the hook again. Until then
    parameters that ``placements`` keeps gathered count as changed after a backward or an in-place
    operator, and not after an optimizer's step alone.
    """
    global _handle
    if _handle is not None:
        _handle.remove()
        _handle = None


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    count_optimizer_step()
    if optimizer in _checked:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (name := stale_name(param)) is not None:
                raise RuntimeError(
                    f"fsdp: {type(optimizer).__name__} has parameter {name!r} as it was before "
                    f"it was sharded, or while it was gathered, and would train nothing; build the "
                    f"optimizer after fully_shard, from the parameters of the sharded model"
                )
    _checked.add(optimizer)
