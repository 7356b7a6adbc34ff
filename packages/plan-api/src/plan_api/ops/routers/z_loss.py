"""Adds the z-loss of routers to a model's loss: the mean of the squares of logsumexp(logits).

The mean is over all tokens, those of other ranks included, and the losses of several routers are
added, as in Megatron. A token's gradient is a rank's own, so that one all-reduce of two numbers for
each router is enough for the value and the number of tokens. Outputs without a loss, as those of
the first stages of a pipeline, get the gradient of the z-loss instead of its value.

Source: ST-MoE, equation 5 (https://arxiv.org/abs/2202.08906).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import ExpertIndices, Site
from plan_api.ops.routers.tokens import (
    RouterTokens,
    check_before_parallelize,
    router_tokens,
    routers_of,
    with_value,
)
from plan_api.runtime.containers import map_tensors, replace_part
from plan_api.runtime.hooks import is_validating

__all__ = ["RouterZLoss", "add_router_z_loss", "install_router_z_loss"]

_ATTRIBUTE = "_router_z_loss"


@dataclass(eq=False)
class RouterZLoss:
    """The z-loss of a model's routers.

    Attributes:
        coefficient: factor of the z-loss.
        scale: factor of its gradient in calls whose outputs have no loss: that of their loss in
            what backward is called on, such as one over the number of microbatches.
        attached: the z-losses of such calls, times the coefficient, in order: float32 scalars,
            the same on all ranks. The caller removes them.
    """

    coefficient: float
    scale: float = 1.0
    attached: list[torch.Tensor] = field(default_factory=list)
    _handles: list[RemovableHandle] = field(default_factory=list, repr=False)  # of one device


def add_router_z_loss(model: nn.Module, coefficient: float) -> RouterZLoss:
    """Adds the z-loss of a model's routers to the loss in its output, by hooks.

    It is added while gradients are enabled and the routers are in training mode, so that a loss of
    evaluation is without it. Recomputed layers count once; padding counts as tokens do.

    Args:
        model: of transformers, with routers that return logits (tokens, experts) first. Call this
            before `parallelize`, which makes the loss that of the tokens of all ranks.
        coefficient: factor of the z-loss, above 0; ST-MoE has 1e-3.

    Returns:
        the loss, with what a pipeline needs where an output has no loss.

    Raises:
        ValueError: the coefficient is not a positive number, the model has no such routers, has a
            z-loss already or has been parallelized.
    """
    if not (math.isfinite(coefficient) and coefficient > 0):
        raise ValueError(
            f"add_router_z_loss: expected a coefficient above 0, got {coefficient}; give one such "
            f"as 1e-3, or leave the call out"
        )
    check_before_parallelize(model, "add_router_z_loss", _ATTRIBUTE)
    loss = RouterZLoss(coefficient)
    setattr(model, _ATTRIBUTE, loss)
    loss._handles += _Hooks(loss, RouterTokens(), "plain").install(model)
    return loss


def install_router_z_loss(
    model: nn.Module,
    sites: Iterable[Site],
    indices: Mapping[str, Sequence[ExpertIndices]],
    mesh: DeviceMesh,
    mode: Literal["eager", "static"],
) -> Iterator[RemovableHandle]:
    """Installs hooks that add the z-loss of the tokens of all ranks, if `add_router_z_loss` did.

    Args:
        model: any, or its shadow model.
        sites: of the plan.
        indices: arguments that index into sharded parameters, by the path of their module.
        mesh: of the plan.
        mode: as in `parallelize`.
    """
    loss = vars(model).get(_ATTRIBUTE)
    if loss is not None:
        for handle in loss._handles:
            handle.remove()
        yield from _Hooks(loss, router_tokens(sites, indices, mesh), mode).install(model)


class _Hooks:
    """Hooks of a model and its routers.

    Args:
        loss: the model's.
        tokens: how ranks share them.
        mode: as in `parallelize`; plain: the model is not parallelized.
    """

    def __init__(
        self, loss: RouterZLoss, tokens: RouterTokens, mode: Literal["plain", "eager", "static"]
    ) -> None:
        self._loss, self._tokens, self._mode = loss, tokens, mode
        self._logits: list[torch.Tensor] | None = None  # of a call of the model

    def install(self, model: nn.Module) -> Iterator[RemovableHandle]:
        for router in routers_of(model).values():
            yield router.register_forward_hook(self._collect)
        yield model.register_forward_pre_hook(self._begin)
        yield model.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._logits = []

    def _collect(self, router: nn.Module, _: Any, output: Any) -> None:
        # Backward, which recomputes layers, runs hooks again, outside of a call of the model.
        if self._logits is not None and router.training and torch.is_grad_enabled():
            self._logits.append(output[0])

    def _end(self, _: nn.Module, __: Any, output: Any) -> Any:
        logits, self._logits = self._logits, None
        if not logits:
            return None
        term, value = self._term(logits)
        added = with_value(term, value)
        if self._mode == "eager":
            mesh = self._tokens.mesh
            assert mesh is not None
            added = DTensor.from_local(added, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if isinstance(output, torch.Tensor) and output.ndim == 0:
            return output + added
        if _has_loss(output):
            return replace_part(output, "loss", lambda loss: loss + added, type(output).__name__)
        if not is_validating():
            self._loss.attached.append(value)
        return self._attach(output, term)

    def _term(self, logits: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns this rank's term of the loss, differentiable, and the loss of all ranks."""
        layers = [self._tokens.local(one) for one in logits]
        squares = torch.stack([_squares(one) for one in layers])
        numbers = torch.stack([squares.new_full((), len(one)) for one in layers])
        sums = torch.cat([squares.detach(), numbers])
        of_all, tokens = self._tokens.sum(sums, self._tokens.axes(logits[0])).view(2, -1)
        factors = self._loss.coefficient / tokens
        return (squares * factors).sum(), (of_all * factors).sum()

    def _attach(self, output: Any, term: torch.Tensor) -> Any:
        """Attaches the gradient of a term to the first tensor of an output that has a gradient."""
        attached = False

        def attach(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal attached
            if attached or not tensor.requires_grad:
                return tensor
            attached = True
            found: torch.Tensor = _Attach.apply(tensor, term, self._loss)  # type: ignore[no-untyped-call]
            return found

        return map_tensors(output, attach)


class _Attach(torch.autograd.Function):
    """Returns a tensor, whose backward gives a term the gradient ``scale`` of the loss."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, term: torch.Tensor, loss: RouterZLoss
    ) -> torch.Tensor:
        ctx.loss = loss
        ctx.save_for_backward(term)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        (term,) = ctx.saved_tensors
        return grads[0], torch.full_like(term, ctx.loss.scale), None


def _squares(logits: torch.Tensor) -> torch.Tensor:
    """Returns the sum over tokens of the squares of logsumexp of (tokens, experts), in float32."""
    return logits.float().logsumexp(-1).square().sum()


def _has_loss(output: Any) -> bool:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return isinstance(loss, torch.Tensor)
