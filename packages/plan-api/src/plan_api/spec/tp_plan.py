"""The tensor parallelism that transformers models define, as entries of a plan.

A model's `_tp_plan` gives modules a style each, as in ``{"model.layers.*.mlp.up_proj": "colwise"}``
(transformers/distributed/tensor_parallel.py); the placements here are what a style does to weights,
inputs and outputs.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.spec.placements import interleaved_shard
from plan_api.spec.plan_entries import PlanEntries

__all__ = ["add_tp_plan"]

# By tensor of a module; dim 0 of the weight of a Linear is its output dim.
_Style = Callable[[], Mapping[str, Placement]]
_COLUMNS: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0), "<in>": Replicate()}
_ROWS: dict[str, Placement] = {"weight": Shard(1), "<out>": Replicate()}
_REPLICATED: dict[str, Placement] = {"<in>": Replicate(), "<out>": Replicate()}
_STYLES: dict[str, _Style] = {
    "colwise": lambda: _COLUMNS,
    "colwise_rep": lambda: _COLUMNS | {"<out>": Replicate()},
    "colwise_gather_output": lambda: _COLUMNS | {"<out>": Replicate()},
    "rowwise": lambda: _ROWS,
    "rowwise_rep": lambda: _ROWS,
    "rowwise_split_input": lambda: _ROWS,
    "packed_colwise": lambda: (
        _COLUMNS | dict.fromkeys(("weight", "bias"), interleaved_shard(0, 2, "tp_plan"))
    ),
    "embedding_rowwise": lambda: _REPLICATED | {"weight": Shard(0)},
    "embedding_colwise": lambda: _REPLICATED | {"weight": Shard(1)},
    "sequence_parallel": lambda: {"<in>": Shard(1)},
    "all_reduce": lambda: {"<out>": Replicate()},
    # A replicated DTensor is this by itself, and its gradient.
    "replicate": dict,
    "replicated_with_grad_allreduce": dict,
}
# Of experts, whose fused projections are parameters of (experts, out, in) in a module without
# Linears: by the style that a rule for a parameter has.
_EXPERTS = "moe_tp_experts"
_EXPERT_PARAMS: dict[str, Callable[[], Placement]] = {
    "packed_colwise": lambda: interleaved_shard(1, 2, "tp_plan"),
    "colwise": lambda: Shard(1),
    "rowwise": lambda: Shard(2),
}
# Projections of attention to heads and from them, with the dim of the weight that heads are in.
_HEADS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
_GROUPS = "num_key_value_groups"
_MODEL_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "labels")
_MADE_BY_MODEL = ("attention_mask", "position_ids")  # as plain tensors


def add_tp_plan(plan: PlanEntries, model: nn.Module, tp: str) -> None:
    """Adds a model's own tensor parallelism to a plan.

    Args:
        plan: to which entries are added.
        model: of transformers.
        tp: the axis.

    Raises:
        ValueError: the model has no `_tp_plan`, or one with an unknown style; names the style and
            the module.
    """
    rules: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if not rules:
        raise ValueError(
            f"from_tp_plan: expected a model with a _tp_plan, as transformers' models with tensor "
            f"parallelism have it, got {type(model).__name__}; write a plan, or use one of "
            f"plan_api.zoo"
        )
    modules = dict(model.named_modules())
    for path, argument in dict.fromkeys(_plain_inputs(modules)):
        plan.shard(f"{path}.<in:{argument}>" if path else f"<in:{argument}>", Replicate(), tp)
    for rule, style in rules.items():
        pattern = re.escape(rule).replace(r"\*", r"\d+")
        matched = {name: module for name, module in modules.items() if re.fullmatch(pattern, name)}
        if matched and style == _EXPERTS:
            _add_experts(plan, pattern, [*matched.values()], tp)
            continue
        if style in _EXPERT_PARAMS and rules.get(rule.rpartition(".")[0]) == _EXPERTS:
            if any(re.fullmatch(pattern, name) for name, _ in model.named_parameters()):
                plan.shard(pattern, _EXPERT_PARAMS[style](), tp)
            continue
        if style not in _STYLES or not matched:
            _refuse(rule, style, model, pattern)
            continue  # the rule is for a part that this model does not have
        units = {_unit_of_heads(name, modules) for name in matched}
        unit = units.pop() if len(units) == 1 else None
        for tensor, placement in _STYLES[style]().items():
            if tensor.startswith("<"):
                plan.shard(f"{pattern}.{tensor}", placement, tp)
            elif any(getattr(module, tensor, None) is not None for module in matched.values()):
                of_heads = unit if type(placement) is Shard else None
                plan.shard(rf"{pattern}\.{tensor}", placement, tp, unit=of_heads)


def _add_experts(plan: PlanEntries, pattern: str, experts: Sequence[nn.Module], tp: str) -> None:
    """Runs experts on local tensors: each rank has a part of every expert, and sums outputs."""
    whole, part = Replicate(), Partial()
    weights = {[*inspect.signature(module.forward).parameters][2] for module in experts}
    for argument in ("0", *weights):  # tokens, and the weights of their choices
        plan.redistribute(
            f"{pattern}.<in:{argument}>", whole, whole, tp, grad_src=part, grad_dst=whole
        )
    plan.local(pattern, part, tp)
    plan.redistribute(f"{pattern}.<out>", part, whole, tp)


def _unit_of_heads(name: str, modules: Mapping[str, nn.Module]) -> str | tuple[str, ...] | None:
    """Returns the unit of a projection to heads, or from them, of an attention with ``head_dim``.

    Queries, and what is computed from them, are sharded with the keys and values of their group.
    """
    above, _, own = name.rpartition(".")
    size, weight = getattr(modules[above], "head_dim", None), getattr(modules[name], "weight", None)
    if own not in _HEADS or not isinstance(size, SupportsIndex) or weight is None:
        return None
    if weight.shape[_HEADS[own]] % operator.index(size):
        return None
    grouped = own in ("q_proj", "o_proj") and hasattr(modules[above], _GROUPS)
    return (_GROUPS, "head_dim") if grouped else "head_dim"


def _refuse(rule: str, style: str, model: nn.Module, pattern: str) -> None:
    """Raises ValueError where a rule matches anything in the model."""
    named = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    found = [name for name in named if re.fullmatch(pattern, name)]
    if found:
        known = ", ".join((*_STYLES, _EXPERTS))
        raise ValueError(
            f"from_tp_plan: expected a style among {known} for a module, got {style!r} for "
            f"{rule!r} ({found[0]}) of {type(model).__name__}; write a plan for this model"
        )


def _plain_inputs(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Yields the arguments whose plain tensors meet DTensor parameters: inputs and masks."""
    for name, module in modules.items():
        arguments: Mapping[str, Any] = inspect.signature(module.forward).parameters
        if not name:
            yield from (("", argument) for argument in _MODEL_INPUTS if argument in arguments)
        elif not any(argument in arguments for argument in _MODEL_INPUTS):
            path = re.sub(r"(?<=\\\.)\d+(?=\\\.|$)", r"\\d+", re.escape(name))
            yield from ((path, argument) for argument in _MADE_BY_MODEL if argument in arguments)
