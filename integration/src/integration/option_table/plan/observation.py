"""Trains a model under a plan and observes one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from dbuffer import DBuffer
from integration.option_table.plan.apply import build, make, mesh_of, plan_of, seed_of
from integration.option_table.plan.model import (
    BATCH,
    TOKENS,
    WIDTH,
    CountedMlp,
    PlanModel,
    RoutedExperts,
    ScaledByPosition,
)
from integration.option_table.recording import local_tensor, sent_collectives
from plan_api import parallelize, uninstall
from plan_api.ops.low_precision.products import multiply
from testkit import Collective, CommLog

__all__ = ["PlanObservation", "observe"]

_STEPS = 3
_RATE = 0.1
_NO_UNIT = 5  # of which no dim of the model is a multiple


@dataclass(frozen=True)
class PlanObservation:
    """The observations of this rank in the last of three steps, unless stated otherwise.

    Attributes:
        local_numel: elements of each parameter on this rank between steps.
        sizes: elements of each parameter.
        error: largest difference of gradients and final weights from one device's.
        setup: collectives of `parallelize`.
        forward: collectives of forward.
        backward: collectives of backward.
        step: collectives of the optimizer's step.
        calls: number of forwards of the MLP in each step.
        input_shape: local shape of the input of the first Linear.
        output_shape: local shape of the model's output.
        mlp_shape: local shape of the MLP's output.
        mlp_is_plain: whether the MLP's Linears compute on plain tensors.
        mlp_dtype: in which the MLP's Linears compute.
        is_plain: whether the first Linear computes on plain tensors.
        attention_shape: local shape of attention's input.
        gathered: elements of the MLP's parameters on this rank after forward.
        gathered_over: numbers of ranks over which buffers are gathered in backward.
        last_grad: elements of the last layer's gradient during the first layer's backward.
        same_grad: whether the gradient of the MLP's input is equal on all ranks.
        experts: number of experts that this rank loops over; None without experts.
        experts_plain: whether experts compute on plain tensors.
        router_calls: number of forwards of the router.
        factory_shape: local shape of the tensor that forward creates.
        dropped: share of zeros after dropout.
        weights_before: whether the model had memory for weights before `parallelize`.
        quantized: number of the last forward's products with operands in low precision.
        rules: number of operators that dtensor-rules ran.
        graphs: number of graphs of torch.compile, of all steps.
        refused: errors of `parallelize` for plans that an option makes it refuse, by option.
    """

    local_numel: Mapping[str, int]
    sizes: Mapping[str, int]
    error: float
    setup: tuple[Collective, ...]
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    step: tuple[Collective, ...]
    calls: tuple[int, ...]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    mlp_shape: tuple[int, ...]
    mlp_is_plain: bool
    mlp_dtype: torch.dtype
    is_plain: bool
    attention_shape: tuple[int, ...]
    gathered: int
    gathered_over: frozenset[int]
    last_grad: int
    same_grad: bool
    experts: int | None
    experts_plain: bool
    router_calls: int
    factory_shape: tuple[int, ...]
    dropped: float
    weights_before: bool
    quantized: int
    rules: int
    graphs: int
    refused: Mapping[str, str]


def observe(options: Mapping[str, Any]) -> PlanObservation:
    """Trains three steps under the options of a run and reports what this rank did.

    Raises:
        ValueError: the options are refused.
    """
    from torch._dynamo.utils import counters

    import dtensor_rules

    uninstall()  # of another test in the same processes
    rank = dist.get_rank()
    try:
        refused = {name: _refused(options, name) for name in ("strict", "cover", "unit")
                   if name in options}  # fmt: skip
        with CommLog() as log:
            model = build(options, mesh_of(options), rank)
        seen: dict[str, Any] = {"setup": sent_collectives(log)}
        if options.get("deferred"):
            seen["weights_before"] = _has_memory(make(options, 0))
        watch = _PlanHooks(model)
        dtensor_rules.stats_clear()
        torch._dynamo.reset()  # so that graphs of earlier runs are not reused
        counters.clear()
        seen |= _train(model, watch)
        rules = sum(one.rule + one.cache + one.miss for one in dtensor_rules.stats().values())
        reference = _reference_model(options)
        named = dict(model.named_parameters())
        return PlanObservation(
            local_numel={name: local_tensor(param).numel() for name, param in named.items()},
            sizes={name: param.numel() for name, param in named.items()},
            error=_error(named, dict(reference.named_parameters())),
            rules=rules,
            graphs=counters["stats"]["unique_graphs"],
            refused=refused,
            **({"weights_before": True} | seen | watch.values),
        )
    finally:
        uninstall()


class _PlanHooks:
    """Hooks of a model that record values of the last forward and backward."""

    def __init__(self, model: PlanModel) -> None:
        self.values: dict[str, Any] = {
            "experts": None, "experts_plain": False, "router_calls": 0, "factory_shape": (),
            "same_grad": True,
        }  # fmt: skip
        self._model = model
        self._before("is_plain", model.first, lambda x: not isinstance(x, DTensor))
        self._before("input_shape", model.first, _shape)
        self._before("mlp_is_plain", model.mlp.down, lambda x: not isinstance(x, DTensor))
        self._before("mlp_dtype", model.mlp.down, lambda x: x.dtype)
        self._before("attention_shape", model.attention, _shape)
        self._after("mlp_shape", model.mlp, _shape)
        self._after(
            "dropped", model.dropout, lambda x: float((local_tensor(x) == 0).float().mean())
        )
        self._after("output_shape", model, _shape)
        model.first.register_forward_hook(lambda module, args, out: self._on_grad(out))
        if isinstance(model.routed, RoutedExperts):
            experts = model.routed.experts
            model.routed.router.register_forward_pre_hook(self._count_router)
            self._before("experts_plain", experts, lambda x: not isinstance(x, DTensor))
            self._after("experts", experts, lambda x: experts.seen)
        if isinstance(model.positions, ScaledByPosition):
            positions = model.positions
            self._after("factory_shape", model.positions, lambda x: _shape(positions.factors))

    def _before(self, name: str, module: nn.Module, find: Callable[[Any], Any]) -> None:
        module.register_forward_pre_hook(
            lambda module, args: self.values.__setitem__(name, find(args[0]))
        )

    def _after(self, name: str, module: nn.Module, find: Callable[[Any], Any]) -> None:
        module.register_forward_hook(
            lambda module, args, out: self.values.__setitem__(name, find(out))
        )

    def _count_router(self, *_: Any) -> None:
        self.values["router_calls"] += 1

    def _on_grad(self, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self._in_backward)

    def _in_backward(self, grad: Tensor) -> None:
        params = dict(self._model.named_parameters())
        last = params["last.weight"].grad
        self.values["last_grad"] = 0 if last is None else local_tensor(last).numel()
        self.values["grad"] = local_tensor(grad).detach().clone()


def _train(model: PlanModel, watch: _PlanHooks) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    seen: dict[str, Any] = {"calls": ()}
    for step in range(_STEPS):
        before, watch.values["router_calls"] = CountedMlp.calls, 0
        optimizer.zero_grad()
        x = _batch(step)
        products = mock.patch("plan_api.ops.low_precision.linear.multiply", wraps=multiply)
        with CommLog() as log, products as multiplied:
            out = model(x)
        seen["quantized"] = multiplied.call_count
        seen["forward"] = sent_collectives(log)
        seen["gathered"] = sum(local_tensor(param).numel() for param in model.mlp.parameters())
        gather = mock.patch.object(
            DBuffer, "all_gather_", autospec=True, side_effect=DBuffer.all_gather_
        )
        with CommLog() as log, gather as gathers:
            _loss(out).backward()
        seen["backward"] = sent_collectives(log)
        buffers = [call.args[0] for call in gathers.call_args_list]
        seen["gathered_over"] = frozenset(buffer.mesh.size(-1) for buffer in buffers)
        with CommLog() as log:
            optimizer.step()
        seen["step"] = sent_collectives(log)
        seen["calls"] = (*seen["calls"], CountedMlp.calls - before)
    grad = watch.values.pop("grad")
    every = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(every, grad.contiguous())
    watch.values["same_grad"] = all(torch.allclose(grad, one) for one in every)
    return seen


def _reference_model(options: Mapping[str, Any]) -> PlanModel:
    """Returns the model of one device after the same steps."""
    source = options.get("src_data_rank") or 0
    torch.manual_seed(seed_of(options, source))
    model = PlanModel(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    for step in range(_STEPS):
        optimizer.zero_grad()
        _loss(model(_batch(step))).backward()
        optimizer.step()
    return model


def _batch(step: int) -> Tensor:
    """Draws a step's batch, and leaves the generator where dropout draws from."""
    torch.manual_seed(step)
    return torch.randn(BATCH, TOKENS, WIDTH)


def _loss(out: Tensor) -> Any:
    """Returns a sum, so that the parts of plain tensors add up to it."""
    return out.square().sum() / (BATCH * TOKENS)


def _error(params: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    largest = 0.0
    for name, param in params.items():
        for actual, expected in ((param, reference[name]), (param.grad, reference[name].grad)):
            full = actual.full_tensor() if isinstance(actual, DTensor) else actual
            largest = max(largest, float((full - expected).detach().abs().max()))
    return largest


def _refused(options: Mapping[str, Any], name: str) -> str:
    """Returns the error of `parallelize` for a plan that the option makes it refuse, or ""."""
    plan = plan_of({**options, "cover": name == "cover"}, mesh_of(options))
    if name == "strict":
        for placement in (Shard(0), Replicate()):
            plan.shard(r"first\.weight", placement, plan.axes[0])
    elif name == "unit":
        plan.shard(r"mlp\.up\.weight", Shard(0), "tp", unit=_NO_UNIT)
    strict, mode = name == "strict" and options["strict"], options.get("mode", "eager")
    try:
        parallelize(make(options, 0), plan, strict=strict, mode=mode)
    except ValueError as error:
        return str(error)
    return ""


def _has_memory(model: nn.Module) -> bool:
    from torch._subclasses import FakeTensor

    return not all(isinstance(param.data, FakeTensor) for param in model.parameters())


def _share_of_zeros(tensor: Any) -> float:
    return float((local_tensor(tensor) == 0).float().mean())


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(local_tensor(tensor).shape)
