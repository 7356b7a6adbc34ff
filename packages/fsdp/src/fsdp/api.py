"""`fully_shard` and its sisters, with the keywords of `torch.distributed.fsdp`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from dbuffer import Strategy
from fsdp import _compat
from fsdp.extension import ExtensionGroup
from fsdp.group import Group
from fsdp.grouping import alike
from fsdp.managed import managed_modules, managed_parameters, move_buffers, take
from fsdp.meshes import backward_mesh, checked_mesh, checked_reshard, device_of
from fsdp.module import FSDPModule, make_fsdp
from fsdp.optimizers import watch_optimizers
from fsdp.parameter import ManagedParameter
from fsdp.planned import PlannedGroup
from fsdp.policy import Granularity
from fsdp.quantized import Tiles
from fsdp.state import State, state_of
from fsdp.state_dict import register_state_dict_hooks

__all__ = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

PlacementFn = Callable[[nn.Parameter], "Granularity | Shard | None"]
QuantizeFn = Callable[[nn.Parameter], "Tiles | None"]


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    quantize_fn: QuantizeFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    strategy: Strategy = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    quantize_fn: QuantizeFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    strategy: Strategy = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    quantize_fn: QuantizeFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # it is frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # as torch's
    ignored_params: set[nn.Parameter] | None = None,
    strategy: Strategy = "auto",
) -> Any:
    """Shards a module's parameters over the ranks of a mesh, gathered around forward and backward.

    Call it on parts of a model first, then on the model: each call takes the parameters that no
    earlier one has. They are gathered together, in place, and their gradients reduced together.
    Build the optimizer afterwards.

    In torch the first call registers one hook for all optimizers
    (`torch.optim.optimizer.register_optimizer_step_pre_hook`), which raises where one has
    parameters from before they were sharded; `uninstall` removes it. The first `RaggedShard` of a
    process calls `ragged_shard.install`.

    Args:
        module: changed in place; several modules are gathered as one.
        mesh: of one axis that shards, or of two, (replicate, shard), for HSDP; by default of one
            axis of all ranks.
        reshard_after_forward: whether parameters are freed after forward and gathered again in
            backward. None: of all but the root. A number: they are cut over so many ranks after
            forward, those next to each other in the mesh, which alone gather in backward; it
            divides the axis that shards. Until then modules have the sharded parameters, whose
            changes this backward does not see. Parameters that are DTensors, or that say
            themselves what is gathered of them, take no number.
        shard_placement_fn: of each parameter, the run of elements that no rank boundary may cut:
            `Rows(n)`, `Block(n)`, `Whole()`; None is ``Block(1)``. torch's ``Shard(0)`` means
            slices of dim 0; other dims are refused. torch's ``ShardPlacementResult`` says a mesh,
            too. Tensors with ``fsdp_pre_all_gather`` are sharded into equal chunks of dim 0.
        quantize_fn: of each parameter, the `Tiles` as which it is gathered, a byte an element and a
            scale a tile, and computed with; None leaves it as it is. The parameter itself stays in
            its dtype, and gets the gradients of what was computed with. By default no rank boundary
            cuts a tile.
        mp_policy: dtypes of computing, of reducing, and of outputs.
        offload_policy: torch's ``CPUOffloadPolicy()`` keeps shards and gradients on the host.
        ignored_params: neither sharded, moved, nor reduced.
        strategy: of the collectives, see `DBuffer`: "auto", "native" or "exchange".

    Returns:
        `module`, of a class that is a `FSDPModule` too.

    Raises:
        ValueError: nothing to shard by, a wrong mesh, granularity or option; a granularity that
            cuts tiles; a parameter that another call has. No parameter was changed then, and
            nothing was sent.

    Source: veScale-FSDP, sections 3 and 5; torch/distributed/fsdp/_fully_shard/_fully_shard.py.
    """
    modules = _roots(module)
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ValueError(f"fully_shard: mp_policy={mp_policy!r}; wants a MixedPrecisionPolicy")
    if not isinstance(offload_policy, OffloadPolicy):
        raise ValueError(f"fully_shard: offload_policy={offload_policy!r}; wants an OffloadPolicy")
    if strategy not in get_args(Strategy):
        raise ValueError(
            f"fully_shard: strategy: expected one of {get_args(Strategy)}, got {strategy!r}"
        )
    if ignored_params is not None and not isinstance(ignored_params, set | frozenset):
        raise ValueError(
            f"fully_shard: ignored_params: expected a set of parameters, got "
            f"{type(ignored_params).__name__}; pass set(...)"
        )
    mesh = checked_mesh(mesh)
    reshard, _ = checked_reshard(reshard_after_forward, mesh.size(mesh.ndim - 1))
    device = device_of(mesh)
    ignored = ignored_params or set()
    managed = managed_modules(modules)
    params = managed_parameters(managed, mesh, device, shard_placement_fn, quantize_fn, ignored)
    backward_sizes: dict[DeviceMesh | None, int | None] = {}
    if reshard and reshard_after_forward not in (None, True):
        backward_sizes = {p.mesh: _backward_size(p, reshard_after_forward) for p in params}
    take(params, device)
    move_buffers(managed, device)
    groups = [
        _group(same, device, mp_policy, offload_policy, strategy, backward_sizes)
        for same in alike(params, mp_policy)
    ]
    for group in groups:
        group.reshard_after_forward = reshard
        register_state_dict_hooks(group)
    auto = reshard_after_forward is None
    state = State(modules, groups, device, mp_policy, auto_reshard=auto)
    for one in modules:
        _compat.tell_torch(one, state)
    make_fsdp(modules)
    watch_optimizers()
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes another method gather parameters as forward does; of other modules, nothing.

    Raises:
        ValueError: the module has no such method.
    """
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}"
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
    states = [state for module in modules if (state := state_of(module)) is not None]
    if len(states) != len(modules):
        raise ValueError("share_comm_ctx: wants modules that fully_shard was called on")
    streams = states[0].context.streams
    for state in states:
        state.context.streams = streams
        for below in state.context.all_states or [state]:
            for group in below.groups:
                group.streams = streams


def _roots(module: object) -> tuple[nn.Module, ...]:
    """The modules of a call, without those that are inside others.

    Raises:
        ValueError: none, containers without a forward, one without parameters or sharded already.
    """
    given = [module] if isinstance(module, nn.Module) else module
    if not isinstance(given, Sequence) or not given:
        raise ValueError(f"fully_shard: {module!r}; wants a module, or a list of some")
    for one in given:
        if not isinstance(one, nn.Module):
            raise ValueError(f"fully_shard: {one!r} in the list; wants modules")
        if isinstance(one, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"fully_shard: a {type(one).__name__} has no forward to gather for; call it on "
                f"the modules in it, or give them as one list"
            )
        if state_of(one) is not None:
            raise ValueError(f"fully_shard: {type(one).__name__} is sharded already; call it once")
        if next(one.parameters(), None) is None:
            raise ValueError(
                f"fully_shard: {type(one).__name__} has no parameters, so there is nothing to "
                f"shard; leave it out, the module that holds it runs it all the same"
            )
    inside = {id(child) for one in given for child in one.modules() if child is not one}
    return tuple(one for one in dict.fromkeys(given) if id(one) not in inside)


def _group(
    params: Sequence[ManagedParameter],
    device: torch.device,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    strategy: Strategy,
    backward_sizes: Mapping[DeviceMesh | None, int | None],
) -> Group:
    """The group of parameters that are alike."""
    first, mesh = params[0], params[0].mesh
    assert mesh is not None, "managed_parameters gives one"
    policy = _compat.policy_of(first.given, mp_policy)
    arguments = (params, mesh, device, policy, offload_policy, strategy)
    if first.extension:
        return ExtensionGroup(*arguments)
    size = backward_sizes.get(mesh)
    smaller = None if size is None else backward_mesh(mesh, size)
    return PlannedGroup(*arguments, backward_mesh=smaller)


def _backward_size(param: ManagedParameter, number: object) -> int | None:
    """The ranks over which a parameter is sharded between forward and backward; None: all.

    Raises:
        ValueError: the number does not divide those of its own mesh; it is placed on other axes, or
            says itself what is gathered of it.
    """
    assert param.mesh is not None, "managed_parameters gives one"
    _, size = checked_reshard(number, param.mesh.size(param.mesh.ndim - 1))
    if size is not None and (param.placed is not None or param.extension):
        kind = "a DTensor" if param.placed is not None else "a tensor with fsdp_pre_all_gather"
        raise ValueError(
            f"fully_shard: reshard_after_forward: expected True or False for parameter "
            f"{param.name!r}, which is {kind}, got {number}; give one of these, or shard its "
            f"module in a call of its own"
        )
    return size
