"""The tensor parallelism that transformers' models bring along, as entries of a plan.

A model's `_tp_plan` gives modules a style each, as in ``{"model.layers.*.mlp.up_proj": "colwise"}``
(transformers/distributed/tensor_parallel.py); what a style does to weights, inputs and outputs is
said here by placements.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.zoo.needs import fused

if TYPE_CHECKING:
    from plan_api.spec.plan import Plan

__all__ = ["add_tp_plan"]

# The tensor of a module, and how it is placed; of a Linear, dim 0 of its weight is what it returns.
_Style = Callable[[], Mapping[str, Placement]]
_COLUMNS: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0), "<in>": Replicate()}
_ROWS: dict[str, Placement] = {"weight": Shard(1), "<out>": Replicate()}
_WHOLE: dict[str, Placement] = {"<in>": Replicate(), "<out>": Replicate()}
_STYLES: dict[str, _Style] = {
    "colwise": lambda: _COLUMNS,
    "colwise_rep": lambda: _COLUMNS | {"<out>": Replicate()},
    "colwise_gather_output": lambda: _COLUMNS | {"<out>": Replicate()},
    "rowwise": lambda: _ROWS,
    "rowwise_rep": lambda: _ROWS,
    "rowwise_split_input": lambda: _ROWS,
    "packed_colwise": lambda: _COLUMNS | dict.fromkeys(("weight", "bias"), fused(0, 2, "tp_plan")),
    "embedding_rowwise": lambda: _WHOLE | {"weight": Shard(0)},
    "embedding_colwise": lambda: _WHOLE | {"weight": Shard(1)},
    "sequence_parallel": lambda: {"<in>": Shard(1)},
    "all_reduce": lambda: {"<out>": Replicate()},
    # What a DTensor that is whole on every rank does by itself, its gradient too.
    "replicate": dict,
    "replicated_with_grad_allreduce": dict,
}
_HEADS = ("q_proj", "k_proj", "v_proj")
_GIVEN = ("input_ids", "inputs_embeds", "pixel_values", "labels")
_MADE = ("attention_mask", "position_ids")  # by the model itself, as plain tensors


def add_tp_plan(plan: Plan, model: nn.Module, tp: str) -> None:
    """Adds a model's own tensor parallelism to a plan.

    Args:
        plan: is added to.
        model: of transformers.
        tp: the axis.

    Raises:
        ValueError: the model has no `_tp_plan`, or it asks for what a plan cannot say; names the
            style and the module.
    """
    rules: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if not rules:
        raise ValueError(
            f"from_tp_plan: {type(model).__name__} has no _tp_plan, which transformers' models "
            f"with tensor parallelism have; write a plan, or take one of plan_api.zoo"
        )
    modules = dict(model.named_modules())
    for path, whole in dict.fromkeys(_plain_inputs(modules)):
        plan.shard(f"{path}.<in:{whole}>" if path else f"<in:{whole}>", Replicate(), tp)
    for rule, style in rules.items():
        pattern = re.escape(rule).replace(r"\*", r"\d+")
        matched = {name: one for name, one in modules.items() if re.fullmatch(pattern, name)}
        if style not in _STYLES or not matched:
            _refuse(rule, style, model, pattern)
            continue  # for a part that this model lacks
        heads = all(_makes_heads(name, modules) for name in matched)
        for tensor, placement in _STYLES[style]().items():
            if tensor.startswith("<"):
                plan.shard(f"{pattern}.{tensor}", placement, tp)
            elif any(getattr(module, tensor, None) is not None for module in matched.values()):
                unit = "head_dim" if heads and placement == Shard(0) else None
                plan.shard(rf"{pattern}\.{tensor}", placement, tp, unit=unit)


def _makes_heads(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module makes the queries, keys or values of an attention that tells their size."""
    above, _, own = name.rpartition(".")
    size, weight = getattr(modules[above], "head_dim", None), getattr(modules[name], "weight", None)
    if own not in _HEADS or not isinstance(size, SupportsIndex) or weight is None:
        return False
    return bool(weight.shape[0] % operator.index(size) == 0)


def _refuse(rule: str, style: str, model: nn.Module, pattern: str) -> None:
    """Raises where a rule means something in the model."""
    named = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    found = [name for name in named if re.fullmatch(pattern, name)]
    if found:
        raise ValueError(
            f"from_tp_plan: {type(model).__name__} asks for style {style!r} for {rule!r} "
            f"({found[0]}), which is not known here for it; known for modules are "
            f"{', '.join(_STYLES)}; write a plan for this model"
        )


def _plain_inputs(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Where plain tensors meet parameters, which are DTensors: the model's inputs, and masks."""
    for name, module in modules.items():
        arguments: Mapping[str, Any] = inspect.signature(module.forward).parameters
        if not name:
            yield from (("", argument) for argument in _GIVEN if argument in arguments)
        elif not any(argument in arguments for argument in _GIVEN):
            path = re.sub(r"(?<=\\\.)\d+(?=\\\.|$)", r"\\d+", re.escape(name))
            yield from ((path, argument) for argument in _MADE if argument in arguments)
