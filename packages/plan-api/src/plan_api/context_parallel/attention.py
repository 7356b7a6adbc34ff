"""Intercepts `scaled_dot_product_attention` in modules whose sequence is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from plan_api.context_parallel.all_gather import all_gather_attention
from plan_api.context_parallel.order import AttentionCall, SequenceSharding
from plan_api.context_parallel.ring import ring_attention
from plan_api.context_parallel.ulysses import ulysses_attention
from plan_api.lowering.ir import OpKind, Site, SiteStep
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
    "IMPLEMENTATIONS", "attention_calls", "install_context_parallel", "table_of_attention",
]  # fmt: skip

_LocalAttention: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionCall], torch.Tensor
]
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
    for site in sites:
        for step in site.steps:
            if step.kind is OpKind.CONTEXT:
                at = StepContext(f"attention of {site.path}", step)
                attention = at.wrap(
                    _ContextParallelAttention(site.path, step, mesh, is_static=is_static)
                )
                found[site.path] = InterceptedCalls(_FUSED, {None: attention})
    return found


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


class _ContextParallelAttention:
    """Replaces `scaled_dot_product_attention` on DTensors, and on local tensors in static mode."""

    def __init__(self, path: str, step: SiteStep, mesh: DeviceMesh, *, is_static: bool) -> None:
        ((axis, move),) = step.moves.items()
        options, self._is_static = dict(move.options), is_static
        self._path, self._step, self._mesh, self._axis_name = path, step, mesh, axis
        self._axis = axis_names(mesh).index(axis)
        self._order = SequenceSharding(options["order"], mesh.size(self._axis))
        self._attention = IMPLEMENTATIONS[options["method"]]
        self._backward_context = StepContext(f"the backward of attention of {path}", step)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Computes attention; see `torch.nn.functional.scaled_dot_product_attention`.

        Raises:
            ValueError: the arguments are not supported on a sharded sequence; nothing has been
                sent.
        """
        self._check_options(attn_mask, dropout_p)
        query, key, value = cast_down(query, key, value)
        call = AttentionCall(
            self._mesh, self._axis, self._order, is_causal, scale, self._path,
            self._backward_context,
        )  # fmt: skip
        if self._is_static:
            self._check_shapes(query, key, value, is_causal)
            self._check_groups(query, key, enable_gqa)
            length = query.shape[_SEQUENCE] * self._order.ranks
            self._order.check_length(length, self._path)
            return self._run(query, key, value, call)
        query = self._check_placements(query)
        key, value = self._check_placements(key), self._check_placements(value)
        self._check_same_placements(query, key, value)
        self._check_shapes(query, key, value, is_causal)
        self._check_groups(query.to_local(), key.to_local(), enable_gqa)
        placements, shape = query.placements, torch.Size((*query.shape[:-1], value.shape[-1]))
        with moving(self._step, placements, placements):
            out = self._run(query.to_local(), key.to_local(), value.to_local(), call)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            out, self._mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def _run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Computes on local tensors, and creates local ones, also under `Plan.factory`."""
        with torch._C.DisableTorchFunction():
            return self._attention(query, key, value, call).contiguous()

    def _waits_for_(self) -> str:
        """Describes the collective to `fused_comm.diagnosis`."""
        return f"plan-api: attention of {self._path}, {self._step.description}"

    def _check_options(self, attn_mask: torch.Tensor | None, dropout_p: float) -> None:
        if attn_mask is not None:
            raise ValueError(
                f"{self._path}: expected causal or full attention without a mask, as context "
                f"parallelism along {self._axis_name!r} supports no other, got a mask of "
                f"{tuple(attn_mask.shape)}; pad causal sequences at their end, with labels of -100 "
                f"and no attention_mask: no token attends to what follows it"
            )
        if dropout_p > 0.0:
            raise ValueError(
                f"{self._path}: expected attention without dropout, as the ranks of "
                f"{self._axis_name!r} cannot draw one device's mask in fused kernels, got "
                f"dropout_p={dropout_p}; set it to 0, attention_dropout=0.0 in transformers"
            )

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
        self._order.check_length(tensor.shape[_SEQUENCE], self._path)
        return tensor

    def _check_shapes(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> None:
        lengths = query.shape[_SEQUENCE], key.shape[_SEQUENCE]
        if key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"{self._path}: context parallelism expected a value for each key, and as many "
                f"features in queries as in keys, got queries of {tuple(query.shape)}, keys of "
                f"{tuple(key.shape)} and values of {tuple(value.shape)}"
            )
        if causal and lengths[0] != lengths[1]:
            raise ValueError(
                f"{self._path}: expected as many queries as keys in causal attention, as in "
                f"training, got {lengths[0]} queries and {lengths[1]} keys"
            )

    def _check_same_placements(self, query: DTensor, key: DTensor, value: DTensor) -> None:
        if not query.placements == key.placements == value.placements:
            raise ValueError(
                f"{self._path}: expected queries, keys and values with the same placements, got "
                f"{query.placements}, {key.placements}, {value.placements}"
            )

    def _check_groups(self, query: torch.Tensor, key: torch.Tensor, enable_gqa: bool) -> None:
        """Checks the heads of local tensors."""
        heads, key_heads = (one.shape[_HEADS] for one in (query, key))
        if heads != key_heads and (heads % key_heads or not enable_gqa):
            raise ValueError(
                f"{self._path}: expected key-value heads that divide the heads, and fewer of them "
                f"under enable_gqa=True only, got {heads} heads and {key_heads} key-value heads on "
                f"this rank"
            )
