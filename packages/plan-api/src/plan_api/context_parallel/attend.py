"""`scaled_dot_product_attention` of modules whose sequence is cut, caught and computed over all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from plan_api.context_parallel.gather import gathered_attention
from plan_api.context_parallel.order import Order
from plan_api.context_parallel.ring import ring_attention
from plan_api.context_parallel.setting import Setting
from plan_api.context_parallel.ulysses import ulysses_attention
from plan_api.lowering.ir import OpKind, Site, SiteStep
from plan_api.ops.function_calls import FunctionInterception, InterceptedCalls
from plan_api.runtime.attribution import moving
from plan_api.runtime.error_context import StepContext
from plan_api.spec.axes import axis_names

__all__ = ["install_context"]

_Local: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Setting], torch.Tensor]
_LOCAL: Mapping[str, _Local] = {
    "ring": ring_attention,
    "ulysses": ulysses_attention,
    "all-gather": gathered_attention,
}
# That of torch.nn.functional may be dist-rng's, which calls this one.
_FUSED = torch._C._nn.scaled_dot_product_attention
_HEADS, _SEQUENCE = 1, 2


def install_context(
    model: nn.Module, sites: Iterable[Site], mesh: DeviceMesh
) -> Iterator[RemovableHandle]:
    """Hooks of modules whose attention is over a sequence that is cut.

    Args:
        model: its parameters are DTensors.
        sites: of a plan.
        mesh: the plan's.
    """
    for site in sites:
        for step in site.steps:
            if step.kind is OpKind.CONTEXT:
                at = StepContext(f"attention of {site.path}", step)
                attend = at.wrap(_Attention(site.path, step, mesh))
                span = FunctionInterception({_FUSED: InterceptedCalls(_FUSED, {None: attend})})
                module = model.get_submodule(site.path)
                yield module.register_forward_pre_hook(span.begin)
                yield module.register_forward_hook(span.leave, prepend=True, always_call=True)


class _Attention:
    """Takes the place of `scaled_dot_product_attention`, of DTensors."""

    def __init__(self, path: str, step: SiteStep, mesh: DeviceMesh) -> None:
        ((name, move),) = step.moves.items()
        options = dict(move.options)
        self._path, self._step, self._mesh, self._name = path, step, mesh, name
        self._axis = axis_names(mesh).index(name)
        self._order = Order(options["order"], mesh.size(self._axis))
        self._attend = _LOCAL[options["method"]]
        self._in_backward = StepContext(f"the backward of attention of {path}", step)

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
        """See torch.nn.functional.

        Raises:
            ValueError: what cannot be computed on a part of the sequence; nothing has been sent.
        """
        self._check_options(attn_mask, dropout_p)
        query, key, value = self._checked(query), self._checked(key), self._checked(value)
        self._check_alike(query, key, value, is_causal)
        self._check_groups(query, key, enable_gqa)
        placed, shape = query.placements, query.shape
        setting = Setting(
            self._mesh, self._axis, self._order, is_causal, scale, self._path, self._in_backward
        )
        with moving(self._step, placed, placed):
            out = self._attend(query.to_local(), key.to_local(), value.to_local(), setting)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            out.contiguous(), self._mesh, placed, run_check=False, shape=shape, stride=stride
        )

    def _waits_for_(self) -> str:
        """For `fused_comm.diagnosis`."""
        return f"plan-api: attention of {self._path}, {self._step.description}"

    def _check_options(self, attn_mask: torch.Tensor | None, dropout_p: float) -> None:
        if attn_mask is not None:
            raise ValueError(
                f"{self._path}: attention is given a mask of {tuple(attn_mask.shape)}, and context "
                f"parallelism along {self._name!r} knows causal and full attention alone; pad "
                f"causal sequences at their end, with labels of -100 and no attention_mask: no "
                f"token sees what comes after it"
            )
        if dropout_p > 0.0:
            raise ValueError(
                f"{self._path}: attention has dropout_p={dropout_p}, and the ranks of "
                f"{self._name!r} cannot draw one device's mask in fused kernels; set it to 0, "
                f"attention_dropout=0.0 in transformers"
            )

    def _checked(self, tensor: torch.Tensor) -> DTensor:
        placements = tensor.placements if isinstance(tensor, DTensor) else ()
        others = [one for axis, one in enumerate(placements) if axis != self._axis]
        if not (
            isinstance(tensor, DTensor)
            and placements[self._axis] == Shard(_SEQUENCE)
            and all(one.is_replicate() or one in (Shard(0), Shard(_HEADS)) for one in others)
        ):
            given = tensor._spec if isinstance(tensor, DTensor) else "a plain tensor"
            raise ValueError(
                f"{self._path}: attention is given {given}; queries, keys and values of (batch, "
                f"heads, sequence, features) have to be cut along {self._name!r} by the sequence, "
                f"Shard({_SEQUENCE}), and along other axes by batch or heads at most; cut what the "
                f"model is given, by sequence('<in:...>', {self._name!r})"
            )
        self._order.check(tensor.shape[_SEQUENCE], self._path)
        return tensor

    def _check_alike(self, query: DTensor, key: DTensor, value: DTensor, causal: bool) -> None:
        lengths = query.shape[_SEQUENCE], key.shape[_SEQUENCE]
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"{self._path}: attention is given queries of {tuple(query.shape)}, keys of "
                f"{tuple(key.shape)} and values of {tuple(value.shape)}; context parallelism wants "
                f"keys and values of one shape, and as many features in queries"
            )
        if not query.placements == key.placements == value.placements:
            raise ValueError(
                f"{self._path}: queries, keys and values are placed differently: "
                f"{query.placements}, {key.placements}, {value.placements}"
            )
        if causal and lengths[0] != lengths[1]:
            raise ValueError(
                f"{self._path}: causal attention of {lengths[0]} queries over {lengths[1]} keys; "
                f"context parallelism is for training, where there are as many"
            )

    def _check_groups(self, query: DTensor, key: DTensor, enable_gqa: bool) -> None:
        heads, key_heads = (one.to_local().shape[_HEADS] for one in (query, key))
        if heads != key_heads and (heads % key_heads or not enable_gqa):
            raise ValueError(
                f"{self._path}: {heads} heads and {key_heads} key-value heads on this rank; "
                f"key-value heads divide the others, and are fewer under enable_gqa=True only"
            )
