"""Trains a model under `fully_shard` and observes one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from integration.option_table.fully_shard.apply import (
    WORDS,
    BlockModel,
    IssuedReduction,
    ShardedModel,
    build,
)
from integration.option_table.recording import local_tensor, sent_collectives
from testkit import Collective, CommLog

_ROWS = 3


@dataclass(frozen=True)
class GradientError:
    """The difference of this rank's gradients from one device's.

    Attributes:
        scale: factor of the gradients.
        error: relative norm of the remaining difference.
    """

    scale: float
    error: float


@dataclass(frozen=True)
class FullyShardObservation:
    """The observations of this rank in the second of two steps, each of two microbatches.

    Attributes:
        parameters: elements of the full model.
        local_numel: elements of each parameter on this rank between steps.
        plain: parameters that are not DTensors.
        axes: mesh axes of a block's matrix.
        devices: devices of shards and gradients.
        compute_dtype: dtype of the output of a block's Linear.
        input_dtype: dtype of an argument of a block's forward.
        output_dtype: dtype of the model's output.
        first_forward: collectives of the first microbatch's forward.
        forward: collectives of the second microbatch's forward.
        first_backward: collectives of the first microbatch's backward.
        backward: collectives of the second microbatch's backward.
        resident: bytes of the storage of a block's unsharded parameter after forward.
        resident_between: the same after a step's backward.
        sharded_after_forward: whether a block has its sharded parameters after forward.
        sharded_after_backward: the same after backward.
        unsharded_in_backward: whether the embedding was unsharded for its backward.
        ahead_in_forward: parts of the model that are unsharded, or whose gather is in flight, in
            the first block's forward.
        ahead_in_backward: the same in the last block's backward.
        in_flight: reductions in flight in the first block's backward.
        waiting: reductions in flight after the first microbatch's backward.
        waiting_at_end: reductions in flight after the second microbatch's backward.
        first_grads: number of parameters with gradients after the first microbatch.
        unused_grad: whether the unused parameter has a gradient.
        grads: difference of the step's gradients from one device's.
        reduce_dtypes: dtypes of the shards in the all-reduce hook.
        custom_gathers: calls of the user's all-gather.
        custom_reductions: calls of the user's reduce-scatter.
        allocations: buffers that torch's collectives allocated from the process group.
        reductions: reductions of both microbatches, by every implementation.
        post_forward_ranks: sizes of the groups over which backward gathered post-forward shards.
        mesh_group: name of the mesh's process group.
    """

    parameters: int
    local_numel: dict[str, int]
    plain: tuple[str, ...]
    axes: tuple[str, ...]
    devices: tuple[str, ...]
    compute_dtype: torch.dtype
    input_dtype: torch.dtype
    output_dtype: torch.dtype
    first_forward: tuple[Collective, ...]
    forward: tuple[Collective, ...]
    first_backward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    resident: int
    resident_between: int
    sharded_after_forward: bool
    sharded_after_backward: bool
    unsharded_in_backward: bool
    ahead_in_forward: tuple[int, ...]
    ahead_in_backward: tuple[int, ...]
    in_flight: int
    waiting: int
    waiting_at_end: int
    first_grads: int
    unused_grad: bool
    grads: GradientError
    reduce_dtypes: tuple[torch.dtype, ...]
    custom_gathers: int
    custom_reductions: int
    allocations: int
    reductions: frozenset[IssuedReduction]
    post_forward_ranks: frozenset[int]
    mesh_group: str


@dataclass
class _FullyShardHooks:
    """Hooks of a model that record values of the last forward and backward."""

    sharded: ShardedModel
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> list[Any]:
        parts: list[Any] = self.sharded.model.parts
        return parts

    def install(self) -> None:
        """Registers hooks, which run after those of `fully_shard`."""
        first, last = self.parts[1], self.parts[3]
        first.down.register_forward_hook(self._in_first_block)
        last.down.register_forward_hook(
            lambda module, args, out: self._on_grad(
                out, lambda: self._note("ahead_in_backward", self.ahead())
            )
        )
        self.parts[0].register_forward_hook(
            lambda module, args, out: self._on_grad(
                out, lambda: self._note("embed_in_backward", not _is_sharded(module.weight))
            )
        )
        first.register_forward_pre_hook(
            lambda module, args: self._note("input_dtype", args[1].dtype)
        )

    def _in_first_block(self, module: Any, args: Any, out: Tensor) -> None:
        local = local_tensor(out)
        self._note("compute_dtype", local.dtype)
        self._note("ahead_in_forward", self.ahead())
        self._note("weight", self.parts[1].down.weight)
        self._on_grad(out, lambda: self._note("in_flight", self.in_flight()))

    def _on_grad(self, out: Tensor, note: Callable[[], None]) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: note())

    def _note(self, name: str, value: Any) -> None:
        self.values[name] = value

    def _groups(self, part: Any) -> list[Any]:
        return list(part._get_fsdp_state().groups)

    def ahead(self) -> tuple[int, ...]:
        """Returns the parts that are unsharded, or whose gather is in flight."""
        return tuple(
            i
            for i, part in enumerate(self.parts)
            if all(group.is_unsharded or group.all_gather.in_flight for group in self._groups(part))
        )

    def in_flight(self) -> int:
        """Returns the number of parameter groups with a reduction in flight."""
        return sum(
            group.reduce_scatter.in_flight
            for part in (*self.parts, self.sharded.model)
            for group in self._groups(part)
        )

    def resident(self) -> int:
        """Returns the bytes of the storage of the first block's unsharded parameter."""
        weight = self.values["weight"]
        local = weight._local_tensor if isinstance(weight, DTensor) else weight
        return int(local.untyped_storage().size())

    def is_sharded(self) -> bool:
        """Returns whether the first block has its sharded parameters."""
        return _is_sharded(self.parts[1].down.weight)


@dataclass
class _IssuedCollectives:
    """The collectives that patched functions of fsdp and torch recorded."""

    reductions: list[IssuedReduction] = field(default_factory=list)
    post_forward_ranks: set[int] = field(default_factory=set)
    allocations: int = 0


class _RecordedCollectives:
    """The collectives of a parameter group, whose reductions are recorded."""

    def __init__(self, collectives: Any, issued: _IssuedCollectives) -> None:
        self._collectives, self._issued = collectives, issued

    def reduce_scatter(self, flat: Tensor, axis: Any, *, average: bool) -> Any:
        self._issued.reductions.append(IssuedReduction(axis.group.group_name, average))
        return self._collectives.reduce_scatter(flat, axis, average=average)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)


@contextmanager
def _issued_collectives() -> Iterator[_IssuedCollectives]:
    """Records reductions, gathers of post-forward shards and allocations within the context."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torch_comms

    from dbuffer import collectives_for
    from fsdp.collectives import comm
    from fsdp.collectives.all_gather import PostForwardShard

    issued = _IssuedCollectives()

    def recorded(*args: Any) -> Any:
        return _RecordedCollectives(collectives_for(*args), issued)

    def reduce(comm: Any, **options: Any) -> Any:
        average = options["op"] == dist.ReduceOp.AVG
        issued.reductions.append(IssuedReduction(options["group"].group_name, average))
        return native_reduce(comm, **options)

    def gather(post_forward: Any) -> Any:
        issued.post_forward_ranks.add(post_forward.mesh.size(1))
        return all_gather(post_forward)

    allocate = torch_comms.ProcessGroupAllocMixin.allocate
    all_gather = PostForwardShard.all_gather
    native_comm = torch_comms.ProcessGroupAllocReduceScatter
    native_reduce = native_comm.__call__
    with (
        mock.patch.object(comm, "collectives_for", recorded),
        mock.patch.object(PostForwardShard, "all_gather", gather),
        mock.patch.object(native_comm, "__call__", reduce),
        mock.patch.object(
            torch_comms.ProcessGroupAllocMixin, "allocate", autospec=True, side_effect=allocate
        ) as allocations,
    ):
        yield issued
    issued.allocations = allocations.call_count


def observe(options: Mapping[str, Any]) -> FullyShardObservation:
    """Trains two steps under the options of a run and reports what this rank did.

    Raises:
        ValueError: the options are refused.
    """
    with _issued_collectives() as issued:
        sharded = build(options)
        hooks = _FullyShardHooks(sharded)
        hooks.install()
        _step(sharded, hooks, options, 0)
        sharded.model.zero_grad()
        sharded.hooked.clear()
        seen = _step(sharded, hooks, options, 1)
    params = dict(sharded.model.named_parameters())
    hook_values = ("compute_dtype", "input_dtype", "ahead_in_forward", "ahead_in_backward",
                   "in_flight")  # fmt: skip
    seen |= {name: hooks.values[name] for name in hook_values}
    mesh = params["head.weight"].device_mesh
    return FullyShardObservation(
        parameters=sum(param.numel() for param in params.values()),
        local_numel={name: local_tensor(param).numel() for name, param in params.items()},
        plain=tuple(name for name, param in params.items() if not _is_sharded(param)),
        axes=params["blocks.1.up.weight"].device_mesh.mesh_dim_names,
        devices=_devices(params),
        grads=_gradient_error(params, sharded, 1),
        reduce_dtypes=tuple(set(sharded.hooked)),
        custom_gathers=sharded.comms.gathers,
        custom_reductions=len(sharded.comms.reductions),
        allocations=issued.allocations,
        reductions=frozenset((*issued.reductions, *sharded.comms.reductions)),
        post_forward_ranks=frozenset(issued.post_forward_ranks),
        mesh_group=mesh.get_group(mesh.ndim - 1).group_name,
        **seen,
    )


def _devices(params: Mapping[str, Any]) -> tuple[str, ...]:
    tensors = [tensor for param in params.values() for tensor in (param, param.grad)]
    return tuple({str(local_tensor(tensor).device) for tensor in tensors if tensor is not None})


def _step(
    sharded: ShardedModel, hooks: _FullyShardHooks, options: Mapping[str, Any], step: int
) -> dict[str, Any]:
    """Runs two microbatches; the first does not reduce or does not wait, as the options set."""
    model, seen = sharded.model, dict[str, Any]()
    for name in ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward"):
        if name in options:
            getattr(model, name)(False)
    with CommLog() as log:
        out = model(*_batch(step, 0, dist.get_rank()))
    seen["first_forward"] = sent_collectives(log)
    if {"set_is_last_backward", "set_manual_backward_finalization"} & set(options):
        _loss(out).backward()  # not recorded, as a log cannot end while collectives are in flight
        seen["first_backward"] = ()
    else:
        with CommLog() as log:
            _loss(out).backward()
        seen["first_backward"] = sent_collectives(log)
    seen["waiting"] = hooks.in_flight()
    seen["first_grads"] = sum(param.grad is not None for param in model.parameters())
    for name in ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward"):
        if name in options:
            getattr(model, name)(True)
    with CommLog() as log:
        out = model(*_batch(step, 1, dist.get_rank()))
    seen["forward"], seen["output_dtype"] = sent_collectives(log), out.dtype
    seen["resident"], seen["sharded_after_forward"] = hooks.resident(), hooks.is_sharded()
    embed_before = _is_sharded(model.embed.weight)
    with CommLog() as log:
        _loss(out).backward()
        seen["waiting_at_end"] = hooks.in_flight()
        if "set_manual_backward_finalization" in options:
            model.finalize_backward()
    seen["backward"] = sent_collectives(log)
    seen["unsharded_in_backward"] = embed_before and hooks.values["embed_in_backward"]
    assert hooks.in_flight() == 0
    seen["resident_between"] = hooks.resident()
    seen["sharded_after_backward"] = hooks.is_sharded()
    model.reshard()
    for part in hooks.parts:
        part.reshard()
    seen["unused_grad"] = hooks.parts[2].unused.grad is not None
    return seen


def _batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, WORDS, (_ROWS,)), torch.rand(_ROWS, 1) + 0.5


def _loss(out: Tensor) -> Tensor:
    return out.float().square().mean()


def _gradient_error(params: Mapping[str, Any], sharded: ShardedModel, step: int) -> GradientError:
    """Compares gradients with those of one device that has the batches of all ranks."""
    reference, ranks = BlockModel(), dist.get_world_size()
    for rank in range(ranks):
        for micro in range(2):
            (_loss(reference(*_batch(step, micro, rank))) / ranks).backward()
    actual, expected = [], []
    ignored = {id(param) for param in sharded.ignored}
    for name, param in reference.named_parameters():
        grad = params[name].grad
        if grad is None or param.grad is None or id(params[name]) in ignored:
            continue
        actual.append(grad.full_tensor().float().flatten())
        expected.append(param.grad.flatten())
    grads, one_device = torch.cat(actual), torch.cat(expected)
    scale = float(grads @ one_device / (one_device @ one_device))
    return GradientError(scale, float((grads - scale * one_device).norm() / grads.norm()))


def _is_sharded(param: Tensor) -> bool:
    """Returns whether it is a parameter of `fully_shard`'s between steps."""
    if not isinstance(param, DTensor):
        return False
    names = param.device_mesh.mesh_dim_names or ()
    return "shard" in names or "shard_replicate" in names  # the latter of HFSDP
