"""Computes the auxiliary loss of transformers' routers over the tokens of all ranks.

transformers adds it to a model's loss under ``output_router_logits=True``: the number of experts
times the sum over them of f P, where f is the share of the tokens that chose an expert, and P its
mean probability, in all layers. A product of means over a part of the tokens is another number, so
both are summed over the ranks that share the tokens, in one all-reduce, before they are multiplied.
The gradient of P is a rank's own; f has none.

Source: Switch Transformer, equations 4 to 6 (https://arxiv.org/abs/2101.03961).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import ExpertIndices, Site
from plan_api.ops.routers.tokens import RouterTokens, axes_of_loss, router_tokens, with_value
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.hooks import register_always_called

__all__ = ["install_router_loss"]

_OPTION = "output_router_logits"
_FUNCTION = "load_balancing_loss_func"  # beside a model's class
_ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")


def install_router_loss(
    model: nn.Module,
    sites: Iterable[Site],
    indices: Mapping[str, Sequence[ExpertIndices]],
    mesh: DeviceMesh,
    mode: Literal["eager", "static"],
) -> Iterator[RemovableHandle]:
    """Installs hooks that replace transformers' function of the loss while a model runs.

    The ``aux_loss`` of the model's output is that of the tokens of all ranks.

    Args:
        model: any; only transformers' mixtures of experts are concerned.
        sites: of the plan.
        indices: arguments that index into sharded parameters, by the path of their module.
        mesh: of the plan.
        mode: as in `parallelize`.
    """
    if not hasattr(getattr(model, "config", None), _OPTION):
        return
    module = _module_with_function(model)
    if module is None:
        yield model.register_forward_pre_hook(_refuse, prepend=True, with_kwargs=True)
        return
    sites = list(sites)
    tokens = router_tokens(sites, indices, mesh)
    loss = _RouterLoss(module, mesh, axes_of_loss(sites, mesh), tokens, mode)
    yield model.register_forward_pre_hook(loss.swap_in, prepend=True)
    yield register_always_called(model, loss.restore)


class _RouterLoss:
    """Hooks of a model that has the function.

    Args:
        module: of Python, in which the model's class finds the function.
        mesh: of the plan.
        summed: numbers of the axes along which the model's own loss is a rank's term of a sum.
        tokens: how ranks share them.
        mode: as in `parallelize`.
    """

    def __init__(
        self,
        module: Any,
        mesh: DeviceMesh,
        summed: set[int],
        tokens: RouterTokens,
        mode: Literal["eager", "static"],
    ) -> None:
        self._module, self._mesh, self._mode = module, mesh, mode
        self._terms = math.prod(mesh.size(axis) for axis in summed)
        self._tokens = tokens
        self._native: Any = None
        # Of all ranks, by the id of this rank's term, which is kept so that its id is its own.
        self._losses: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def swap_in(self, *_: Any) -> None:
        self._native = getattr(self._module, _FUNCTION)
        setattr(self._module, _FUNCTION, self._loss)

    def restore(self, _: nn.Module, __: Any, output: Any) -> Any:
        if self._native is not None:
            setattr(self._module, _FUNCTION, self._native)
        losses, self._native, self._losses = self._losses, None, {}
        if not losses or output is None:
            return None
        return map_tensors(output, lambda tensor: losses.get(id(tensor), (tensor,))[0])

    def _loss(
        self,
        gate_logits: Any,
        num_experts: int,
        top_k: int = 2,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        """Computes the loss of the arguments of transformers' function.

        Returns:
            in Eager, a replicated DTensor; in static mode this rank's term of the model's loss.

        Raises:
            ValueError: the mask is not one of this rank's tokens.
        """
        if not isinstance(gate_logits, tuple):
            return 0
        layers = [self._tokens.local(logits) for logits in gate_logits]
        mask = None if attention_mask is None else _local_mask(attention_mask, len(layers[0]))
        chosen, probabilities, tokens = _sums(layers, num_experts, top_k, mask)
        sums = torch.cat([chosen, probabilities.detach(), tokens])
        sums = self._tokens.sum(sums, self._tokens.axes(gate_logits[0]))
        shares, tokens = sums[:num_experts] / sums[-1], sums[-1]
        term = num_experts * (shares * probabilities).sum() / tokens
        value = num_experts * (shares * sums[num_experts:-1]).sum() / tokens
        loss = with_value(term, value)
        if self._mode == "eager":
            replicated = [Replicate()] * self._mesh.ndim
            return DTensor.from_local(loss, self._mesh, replicated, run_check=False)
        # The plan sums the model's loss over ranks, which then have added the value once.
        added = with_value(term, value / self._terms)
        self._losses[id(added)] = (loss, added)
        return added


def _sums(
    layers: Sequence[torch.Tensor], experts: int, top_k: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over the tokens of all layers' logits (tokens, experts).

    Returns:
        (experts,): how many chose each expert; (experts,): their probabilities, differentiable;
        (1,): how many tokens there are.
    """
    chosen = layers[0].new_zeros(experts, dtype=torch.float32)
    probabilities, tokens = chosen, chosen.new_zeros(1)
    for logits in layers:
        weights = chosen.new_ones(len(logits)) if mask is None else mask
        routing = logits.softmax(-1)
        index = routing.detach().topk(top_k).indices.flatten()
        chosen = chosen.scatter_add(0, index, weights.repeat_interleave(top_k))
        rows = routing.float()
        probabilities = probabilities + (rows if mask is None else rows * mask.unsqueeze(1)).sum(0)
        tokens = tokens + weights.sum()
    return chosen, probabilities, tokens


def _local_mask(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    local = mask.to_local() if isinstance(mask, DTensor) else mask
    if local.numel() != tokens:
        raise ValueError(
            f"{_OPTION}=True: expected an attention_mask of this rank's {tokens} tokens, got one "
            f"of {local.numel()}: shard it as input_ids, plan.shard('<in:attention_mask>', ...); "
            f"where sequences are sharded too, leave it out, and pad at the end"
        )
    return local.flatten().float()


def _module_with_function(model: nn.Module) -> Any:
    for cls in type(model).__mro__:
        module = sys.modules.get(cls.__module__)
        function = getattr(module, _FUNCTION, None)
        if function is not None and (*inspect.signature(function).parameters,) == _ARGUMENTS:
            return module
    return None


def _refuse(model: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
    requested, config = kwargs.get(_OPTION), getattr(model, "config", None)
    if requested if requested is not None else getattr(config, _OPTION, False):
        raise ValueError(
            f"{type(model).__name__}: expected {_OPTION}=False, got True, with which it computes a "
            f"loss of the routers, but not by {_FUNCTION}({', '.join(_ARGUMENTS)}) of its module: "
            f"set config.{_OPTION} = False, and compute a loss in the script, from the routers' "
            f"outputs summed over the ranks"
        )
