"""Intercepts `scaled_dot_product_attention` in modules whose sequence is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api._compat import divided_axis
from plan_api.context_parallel.batch import current_batch, order_of
from plan_api.context_parallel.call import AttentionCall
from plan_api.context_parallel.dropout import AttentionDropout
from plan_api.context_parallel.mask import AttentionMask
from plan_api.context_parallel.methods import (
    all_gather_attention,
    ring_attention,
    ulysses_attention,
)
from plan_api.context_parallel.order import SequenceSharding, TokenOrder
from plan_api.lowering.ir import HookPoint, OpKind, Site, SiteStep
from plan_api.ops.attention import draws_attention_masks
from plan_api.ops.autocast import cast_down
from plan_api.ops.function_calls import (
    FunctionInterception,
    InterceptedCalls,
    TorchFunction,
    with_wrapped,
)
from plan_api.runtime.attribution import moving
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.hooks import register_always_called
from plan_api.spec.axes import axis_names

__all__ = [
    "IMPLEMENTATIONS", "attention_calls", "check_attention_is_called", "install_context_parallel",
    "table_of_attention",
]  # fmt: skip


class _LocalAttention(Protocol):
    """Attention of this rank's queries over all ranks' keys, on local tensors."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


#: By method: attention of this rank's queries over all ranks' keys, on local tensors.
IMPLEMENTATIONS: Mapping[str, _LocalAttention] = {
    "ring": ring_attention,
    "ulysses": ulysses_attention,
    "all-gather": all_gather_attention,
}
_FUSED = torch._C._nn.scaled_dot_product_attention
_HEADS, _SEQUENCE = 1, 2


def attention_calls(
    sites: Iterable[Site], mesh: DeviceMesh, *, is_static: bool = False
) -> dict[str, InterceptedCalls]:
    """Returns what modules with a sharded sequence call instead of attention, by their paths.

    Args:
        sites: the sites of a plan.
        mesh: the plan's mesh.
        is_static: whether modules run on local tensors.
    """
    found: dict[str, InterceptedCalls] = {}
    sites, groups = list(sites), _GroupedMeshes(mesh)
    for site in sites:
        for step in site.steps:
            if step.kind is OpKind.CONTEXT:
                at = StepContext(f"attention of {site.path}", step)
                attention = at.wrap(
                    _ContextParallelAttention(
                        site.path, step, mesh, _dropout_placements(sites, site.path, mesh), groups,
                        is_static=is_static,
                    )
                )  # fmt: skip
                found[site.path] = InterceptedCalls(_FUSED, {None: attention})
    return found


class _GroupedMeshes:
    """Divides axes of a mesh into groups of consecutive ranks, once for all modules.

    Args:
        mesh: of the plan.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._found: dict[tuple[int, int], DeviceMesh] = {}

    def mesh(self, axis: int, ranks: int) -> DeviceMesh:
        """Returns the mesh in whose place of an axis are the groups, and the ranks of each.

        Args:
            axis: by number.
            ranks: of a group.
        """
        if (axis, ranks) not in self._found:
            self._found[axis, ranks] = divided_axis(self._mesh, axis, ranks)
        return self._found[axis, ranks]


def table_of_attention(calls: InterceptedCalls) -> dict[TorchFunction, InterceptedCalls]:
    """Returns calls of attention by each function that it may be called by now."""
    functions = (_FUSED, *with_wrapped(nn.functional.scaled_dot_product_attention))
    return dict.fromkeys(functions, calls)


def install_context_parallel(
    model: nn.Module, calls: Mapping[str, InterceptedCalls]
) -> Iterator[RemovableHandle]:
    """Installs hooks on modules whose attention is over a sharded sequence.

    Args:
        model: its parameters are DTensors.
        calls: of `attention_calls`, without those of modules that have an interception already.
    """
    for path, attention in calls.items():
        interception = FunctionInterception(table_of_attention(attention))
        module = model.get_submodule(path)
        yield module.register_forward_pre_hook(interception.begin)
        yield register_always_called(module, interception.leave, prepend=True)


def check_attention_is_called(
    model: nn.Module, calls: Mapping[str, InterceptedCalls]
) -> Iterator[RemovableHandle]:
    """Installs hooks that refuse modules whose attention was not replaced, in the first call.

    Args:
        model: any.
        calls: of `attention_calls`.
    """
    for path, attention in calls.items():
        yield model.get_submodule(path).register_forward_hook(_check_of_calls(path, attention))


def _check_of_calls(path: str, attention: InterceptedCalls) -> Callable[..., None]:
    def hook(*_: object) -> None:
        if not attention.count:
            raise ValueError(
                f"{path}: expected a call of scaled_dot_product_attention, which is over a sharded "
                f"sequence, got none; in transformers set attn_implementation='sdpa', or, for "
                f"windows and sinks, call plan_api.describe_masks(model) before parallelize()"
            )

    return hook


def _dropout_placements(
    sites: Iterable[Site], path: str, mesh: DeviceMesh
) -> tuple[Placement, ...]:
    """Returns how static mode's plan says that a module's attention weights are sharded."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for site in sites:
        if site.path == path and site.hook_point is HookPoint.OPERATOR:
            for step in site.steps:
                if str(step.index).partition(":")[0] == "dropout":
                    for axis, move in step.moves.items():
                        placements[axis_names(mesh).index(axis)] = move.dst
    return tuple(placements)


def _as_shards(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose interleaved shards of one part, of a fused projection, are shards."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = tuple(
        Shard(one.dim) if getattr(one, "interleaves", 0) == 1 else one  # type: ignore[attr-defined]
        for one in tensor.placements
    )
    return tensor if placements == tensor.placements else tensor.redistribute(placements=placements)


class _ContextParallelAttention:
    """Replaces `scaled_dot_product_attention` on DTensors, and on local tensors in static mode."""

    def __init__(
        self,
        path: str,
        step: SiteStep,
        mesh: DeviceMesh,
        dropout_placements: tuple[Placement, ...],
        groups: _GroupedMeshes,
        *,
        is_static: bool,
    ) -> None:
        self._dropout_placements, self._had_batch = dropout_placements, False
        ((axis, move),) = step.moves.items()
        options, self._is_static = dict(move.options), is_static
        self._path, self._step, self._mesh, self._axis_name = path, step, mesh, axis
        self._axis = axis_names(mesh).index(axis)
        self._order = SequenceSharding(options["order"], mesh.size(self._axis))
        method, self._ulysses_axis = options["method"], None
        self._call_mesh = mesh
        if method == "ulysses-ring":
            self._call_mesh = groups.mesh(self._axis, options["ulysses_degree"])
            method, self._ulysses_axis = "ulysses", self._axis + 1
        self._attention = IMPLEMENTATIONS[method]
        self._backward_context = StepContext(f"the backward of attention of {path}", step)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | AttentionMask | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention; see `torch.nn.functional.scaled_dot_product_attention`.

        Args:
            query: as there.
            key: as there.
            value: as there; it may have other features.
            attn_mask: a description of the mask, of the global sequence; beside it ``is_causal``
                adds to the mask.
            dropout_p: as there; its masks are those of one device, by dist-rng.
            is_causal: as there.
            scale: as there.
            enable_gqa: as there.
            sinks: a score of each head for a key without a value, (heads), a DTensor as the queries
                are, sharded as their heads; None: there is none.

        Raises:
            ValueError: the arguments are not supported on a sharded sequence; nothing has been
                sent.
        """
        mask = self._mask(attn_mask, is_causal)
        query, key, value = cast_down(query, key, value)
        if self._is_static:
            return self._on_local(query, key, value, mask, dropout_p, scale, enable_gqa, sinks)
        query, key, value = (self._check_placements(_as_shards(x)) for x in (query, key, value))
        self._check_same_placements(query, key, value)
        placements, shape = query.placements, torch.Size((*query.shape[:-1], value.shape[-1]))
        with moving(self._step, placements, placements):
            out = self._on_local(
                query.to_local(), key.to_local(), value.to_local(), mask, dropout_p, scale,
                enable_gqa, self._local_sinks(sinks, placements), query,
            )  # fmt: skip
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            out, self._mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def _on_local(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: AttentionMask,
        dropout_p: float,
        scale: float | None,
        enable_gqa: bool,
        sinks: torch.Tensor | None,
        global_query: DTensor | None = None,
    ) -> torch.Tensor:
        self._check_shapes(query, key, value, enable_gqa)
        ranks = self._order.ranks
        lengths = [one.shape[_SEQUENCE] * ranks for one in (query, key)]
        order, key_order = (order_of(self._order, length, self._path) for length in lengths)
        # What is created here is local, also where the plan places what the module creates.
        with torch._C.DisableTorchFunction():
            dropout = None
            if dropout_p > 0.0:
                dropout = self._dropout(dropout_p, query, global_query, order, key_order)
            call = AttentionCall(
                self._call_mesh, self._axis, order, mask, scale, self._path,
                self._backward_context, None if key_order == order else key_order,
                self._ulysses_axis, dropout,
            )  # fmt: skip
            call.check(query, key)
            return self._attention(query, key, value, call, sinks).contiguous()

    def _waits_for_(self) -> str:
        """Describes the collective to `fused_comm.diagnosis`."""
        return f"plan-api: attention of {self._path}, {self._step.description}"

    def _mask(
        self, attn_mask: torch.Tensor | AttentionMask | None, is_causal: bool
    ) -> AttentionMask:
        if isinstance(attn_mask, torch.Tensor):
            raise ValueError(
                f"{self._path}: expected a mask by its description, as context parallelism along "
                f"{self._axis_name!r} does not read masks of queries and keys, got a mask of "
                f"{tuple(attn_mask.shape)}; run the step within plan_api.attention_mask(mask), "
                f"without attention_mask and position_ids; for transformers' sliding windows call "
                f"plan_api.describe_masks(model); or pad causal sequences at their end, with "
                f"labels of -100"
            )
        mask, batch = AttentionMask(is_causal), current_batch()
        in_backward = torch._C._current_graph_task_id() != -1
        if batch is None and self._had_batch and in_backward:
            raise ValueError(
                f"{self._path}: expected backward within plan_api.attention_mask, as forward was, "
                f"since the module is recomputed, got no mask; move backward into the block"
            )
        if not in_backward:
            self._had_batch = batch is not None
        if attn_mask is not None:
            mask = mask & attn_mask
        return mask if batch is None else mask & batch.mask

    def _dropout(
        self,
        p: float,
        query: torch.Tensor,
        global_query: DTensor | None,
        order: TokenOrder,
        key_order: TokenOrder,
    ) -> AttentionDropout:
        if not draws_attention_masks(query):
            raise ValueError(
                f"{self._path}: expected attention without dropout, as the ranks of "
                f"{self._axis_name!r} draw one device's mask on a CPU with dist-rng installed "
                f"only, got dropout_p={p}; set it to 0, attention_dropout=0.0 in transformers, or "
                f"call dist_rng.install()"
            )
        from dist_rng import Region

        placements = self._dropout_placements if global_query is None else global_query.placements
        placements = tuple(
            Replicate() if axis == self._axis else one for axis, one in enumerate(placements)
        )
        weights = torch.empty(*query.shape[:2], order.length, key_order.length, device="meta")
        shape = None
        if global_query is not None:
            shape = torch.Size((*global_query.shape[:2], *weights.shape[2:]))
        stride = None if shape is None else torch.empty(shape, device="meta").stride()
        of_rank = DTensor.from_local(
            weights, self._mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return AttentionDropout(p, Region.of(of_rank))

    def _local_sinks(
        self, sinks: torch.Tensor | None, placements: tuple[Placement, ...]
    ) -> torch.Tensor | None:
        """Returns this rank's heads; the gradients of ranks with other tokens are added."""
        if sinks is None:
            return None
        by_heads = [Shard(0) if one == Shard(_HEADS) else Replicate() for one in placements]
        if not isinstance(sinks, DTensor) or list(sinks.placements) != by_heads:
            got = sinks._spec if isinstance(sinks, DTensor) else "a plain tensor"
            raise ValueError(
                f"{self._path}: expected sinks that are sharded as the heads of queries, "
                f"{tuple(by_heads)}, got {got}; add an entry for the parameter"
            )
        grads = [
            Partial() if isinstance(one, Shard) and one.dim != _HEADS else other
            for one, other in zip(placements, by_heads, strict=True)
        ]
        return sinks.to_local(grad_placements=grads)

    def _check_placements(self, tensor: torch.Tensor) -> DTensor:
        placements = tensor.placements if isinstance(tensor, DTensor) else ()
        others = [placement for axis, placement in enumerate(placements) if axis != self._axis]
        if not (
            isinstance(tensor, DTensor)
            and placements[self._axis] == Shard(_SEQUENCE)
            and all(other.is_replicate() or other in (Shard(0), Shard(_HEADS)) for other in others)
        ):
            got = tensor._spec if isinstance(tensor, DTensor) else "a plain tensor"
            raise ValueError(
                f"{self._path}: expected queries, keys and values of (batch, heads, sequence, "
                f"features), sharded along {self._axis_name!r} by the sequence, "
                f"Shard({_SEQUENCE}), and along other axes by batch or heads at most, got {got}; "
                f"shard the inputs of the model, by sequence('<in:...>', {self._axis_name!r})"
            )
        order_of(self._order, tensor.shape[_SEQUENCE], self._path)  # or an error
        return tensor

    def _check_shapes(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
    ) -> None:
        """Checks local tensors."""
        if key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"{self._path}: context parallelism expected as many keys as values, and as many "
                f"features in queries as in keys, got queries of {tuple(query.shape)}, keys of "
                f"{tuple(key.shape)} and values of {tuple(value.shape)}"
            )
        heads, key_heads = (one.shape[_HEADS] for one in (query, key))
        if heads != key_heads and (heads % key_heads or not enable_gqa):
            raise ValueError(
                f"{self._path}: expected key-value heads that divide the heads, and fewer of them "
                f"under enable_gqa=True only, got {heads} heads and {key_heads} key-value heads on "
                f"this rank"
            )

    def _check_same_placements(self, query: DTensor, key: DTensor, value: DTensor) -> None:
        if not query.placements == key.placements == value.placements:
            raise ValueError(
                f"{self._path}: expected queries, keys and values with the same placements, got "
                f"{query.placements}, {key.placements}, {value.placements}"
            )
