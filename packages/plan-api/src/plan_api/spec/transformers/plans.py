"""The parallelism that transformers models define, as entries of a plan.

A model's `_tp_plan` gives modules a style each, as in ``{"model.layers.*.mlp.up_proj": "colwise"}``
(transformers/distributed/tensor_parallel.py); the placements here are what a style does to weights,
inputs and outputs. Its `_ep_plan` names the experts that are sharded by number, to which tokens are
dispatched, and its `_fsdp_plan` the modules that fully_shard is applied to, one by one
(transformers/distributed/fsdp.py). Its `_pp_plan` says which tensors its parts pass on, which a
plan takes from the stages' own code.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.spec.placements import interleaved_shard
from plan_api.spec.plan_entries import PlanEntries
from plan_api.spec.transformers.tensors import (
    check_runs_on_dtensors,
    is_inside_any,
    module_patterns,
    place_created_tensors,
    recurrent_layers,
)

__all__ = ["TransformersAxes", "add_transformers_plans"]

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
    "local_params": dict,  # operators take DTensors: a rule for each parameter places it
    "mla_kv_a_proj": lambda: {"<out>": Replicate()},
}
# Of attention to latents: the method that makes keys and values, and the projection that it calls.
_EXPANDS, _TO_HEADS = "expand_kv", "kv_b_proj"
_REFUSED = {
    "moe_identity_expert": "the outputs of experts are summed over the ranks, each of which would "
    "add those of experts that return their input; leave tp out",
}
_EXPERTS = "moe_tp_experts"
_DISPATCHED = "ep_dispatch_experts"
_BY_NUMBER = "grouped_gemm"  # of parameters of dispatched experts
# Of a parameter that a rule names itself, by its number of dims: the last dim but one has columns,
# and rows are in the last one. A fused projection of experts is (experts, out, in), or, with
# packed_rowwise, (experts, in, out).
_PARAM_STYLES: dict[str, Callable[[int], Placement]] = {
    "colwise": lambda dims: Shard(max(dims - 2, 0)),
    "rowwise": lambda dims: Shard(dims - 1),
    "packed_colwise": lambda dims: interleaved_shard(max(dims - 2, 0), 2, "tp_plan"),
    "packed_rowwise": lambda dims: interleaved_shard(dims - 1, 2, "tp_plan"),
    "replicate": lambda _: Replicate(),
}
# Projections of attention to heads and from them, with the dim of the weight that heads are in.
_HEADS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
_GROUPS = "num_key_value_groups"
# Of fully_shard: whether a module's parameters are gathered again in backward.
_RESHARDS: dict[str, bool | None] = {"free_full_weight": None, "keep_full_weight": False}


@dataclass(frozen=True)
class TransformersAxes:
    """The axes of the parallelism that a model defines.

    Attributes:
        tp: of its `_tp_plan`; None: it has no tensor parallelism.
        ep: of its `_ep_plan`; None: each rank has all experts, or a part of each.
        fsdp: of its `_fsdp_plan`; none: parameters are not fully sharded.
        data: along which batches are sharded, in the order of the mesh; ``ep`` and ``fsdp`` too.
    """

    tp: str | None
    ep: str | None
    fsdp: Sequence[str]
    data: Sequence[str]


@dataclass(frozen=True)
class _Regions:
    """The paths of modules that run on local tensors: parts are summed, or all is replicated."""

    mixtures: Sequence[str]
    recurrent: Sequence[str]


def add_transformers_plans(plan: PlanEntries, model: nn.Module, axes: TransformersAxes) -> None:
    """Adds a model's own parallelism to a plan.

    Args:
        plan: to which entries are added.
        model: of transformers.
        axes: of the plan's mesh.

    Raises:
        ValueError: the model lacks the definition for an axis, or has one with an unknown style;
            names the style and the module; or its own code does not run on DTensors.
    """
    check_runs_on_dtensors(model)
    modules = dict(model.named_modules())
    tp, data = axes.tp, axes.data
    recurrent = recurrent_layers(modules)
    place_created_tensors(plan, modules, recurrent, data, tp)
    _place_keys(plan, model, modules, axes)
    experts = _experts(model, modules)
    mixtures = [
        name.rpartition(".")[0]
        for found in experts.values()
        for name, module in found.items()
        if not _takes_choices(module)
    ]
    styles = {} if tp is None else _rules(model, "_tp_plan", "tensor parallelism", "tp")
    _add_tp_plan(plan, model, modules, styles, _Regions(mixtures, recurrent), axes)
    if axes.ep is not None:
        by_number = _rules(model, "_ep_plan", "expert parallelism", "ep")
        _add_sharded_experts(plan, model, by_number, axes.ep)
    if mixtures:
        _add_mixtures(plan, model, mixtures, styles, axes)
    for rule, found in experts.items():
        if all(map(_takes_choices, found.values())):
            parts = styles.get(rule) == _EXPERTS
            if parts:
                _check_all_sharded(model, found, styles)
            _add_experts(plan, _pattern(rule), [*found.values()], axes, parts=parts)
    if axes.fsdp:
        _add_fsdp_plan(plan, model, modules, axes, [*map(_pattern, experts)])


def _experts(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, dict[str, nn.Module]]:
    """Returns the modules with experts by the rules that name them, whatever the axes are."""
    plans: list[Mapping[str, str]] = [
        getattr(model, name, None) or {} for name in ("_tp_plan", "_ep_plan")
    ]
    rules = sorted({rule for one in plans for rule in one if one[rule] in (_EXPERTS, _DISPATCHED)})
    found = {rule: _matching(rule, modules) for rule in rules}
    return {rule: matched for rule, matched in found.items() if matched}


def _takes_choices(experts: nn.Module) -> bool:
    """Whether experts take tokens, choices and weights; others take weighted tokens of each."""
    return len(inspect.signature(experts.forward).parameters) > 2


def _rules(model: nn.Module, name: str, kind: str, option: str) -> Mapping[str, str]:
    rules: Mapping[str, str] = getattr(model, name, None) or {}
    if not rules:
        raise ValueError(
            f"from_tp_plan: expected a model with a {name}, as transformers' models with {kind} "
            f"have it, got {type(model).__name__}; leave {option} out, write a plan, or use one of "
            f"plan_api.zoo"
        )
    return rules


def _pattern(rule: str) -> str:
    return re.escape(rule).replace(r"\*", r"\d+")


def _matching(rule: str, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    pattern = re.compile(_pattern(rule))
    return {name: module for name, module in modules.items() if pattern.fullmatch(name)}


def _add_tp_plan(
    plan: PlanEntries,
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    rules: Mapping[str, str],
    regions: _Regions,
    axes: TransformersAxes,
) -> None:
    tp = axes.tp
    if tp is None:
        return
    for rule, style in rules.items():
        pattern, found = _pattern(rule), _matching(rule, modules)
        matched = {
            name: one for name, one in found.items() if not is_inside_any(name, regions.recurrent)
        }
        if len(matched) < len(found):
            if not matched:
                continue  # all of its modules are replicated
            pattern = f"({'|'.join(map(re.escape, matched))})"
        if matched and style == _EXPERTS:
            continue  # experts are added for all axes at once
        if not matched and style in _PARAM_STYLES:
            _add_param_rule(plan, model, rule, style, tp, regions.recurrent)
            continue
        if style not in _STYLES or not matched:
            _refuse(rule, style, model, (*_STYLES, _EXPERTS))
            continue  # the rule is for a part that this model does not have
        units = {_unit_of_heads(name, modules) for name in matched}
        unit = units.pop() if len(units) == 1 else None
        within = all(is_inside_any(name, regions.mixtures) for name in matched)
        for tensor, placement in _STYLES[style]().items():
            if tensor.startswith("<"):
                if not within:  # the region's output is summed
                    plan.shard(f"{pattern}.{tensor}", placement, tp)
            elif any(getattr(module, tensor, None) is not None for module in matched.values()):
                of_heads = unit if type(placement) is Shard else None
                plan.shard(rf"{pattern}\.{tensor}", placement, tp, unit=of_heads)


def _add_param_rule(
    plan: PlanEntries,
    model: nn.Module,
    rule: str,
    style: str,
    tp: str,
    replicated: Collection[str],
) -> None:
    """Shards the parameters that a rule names, such as the sinks of attention."""
    params = {
        name: param
        for name, param in model.named_parameters(remove_duplicate=False)
        if re.fullmatch(_pattern(rule), name) and not is_inside_any(name, replicated)
    }
    for dims in {param.ndim for param in params.values()}:
        heads = rule.endswith(".sinks") and all(
            hasattr(model.get_submodule(name.rpartition(".")[0]), _GROUPS) for name in params
        )
        placement = _PARAM_STYLES[style](dims)
        plan.shard(_pattern(rule), placement, tp, unit=_GROUPS if heads else None)


def _place_keys(
    plan: PlanEntries, model: nn.Module, modules: Mapping[str, nn.Module], axes: TransformersAxes
) -> None:
    """Places the keys, which attention to latents writes into a tensor that it creates.

    They are sharded on the heads where the model's plan shards the projection to them.
    """
    rules: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    sharded = {name for rule in rules for name in _matching(rule, modules)}
    placed: dict[bool, list[str]] = {}
    for path, module in modules.items():
        if hasattr(module, _EXPANDS):
            placed.setdefault(f"{path}.{_TO_HEADS}" in sharded, []).append(path)
    for of_heads, paths in placed.items():
        placements: dict[str, Placement] = dict.fromkeys(axes.data, Shard(0))
        if axes.tp is not None:
            placements[axes.tp] = Shard(1) if of_heads else Replicate()
        for pattern in module_patterns(paths) if placements else ():
            plan.factory(pattern, [*placements.values()], [*placements], sizes="local")


def _unsharded(model: nn.Module, paths: Iterable[str], rules: Mapping[str, str]) -> list[str]:
    """Returns the parameters in modules that no rule shards."""
    below = tuple(f"{path}." for path in paths)
    sharding = [
        re.compile(rf"{_pattern(rule)}(\.\w+)?")
        for rule, style in rules.items()
        if style in _PARAM_STYLES and style != "replicate"
    ]
    return [
        name
        for name, _ in model.named_parameters()
        if name.startswith(below) and not any(rule.fullmatch(name) for rule in sharding)
    ]


def _check_all_sharded(model: nn.Module, experts: Iterable[str], rules: Mapping[str, str]) -> None:
    if unsharded := _unsharded(model, experts, rules):
        raise ValueError(
            f"from_tp_plan: expected a rule of the _tp_plan that shards each parameter of experts, "
            f"whose outputs are summed, got none for {unsharded[0]} of {type(model).__name__}, "
            f"which each rank would add; write a plan for this model, or leave tp out"
        )


def _add_mixtures(
    plan: PlanEntries,
    model: nn.Module,
    mixtures: Sequence[str],
    rules: Mapping[str, str],
    axes: TransformersAxes,
) -> None:
    """Runs mixtures on local tensors whose experts take all tokens, weighted for each of them.

    A mixture repeats its tokens for each expert, so that those of the ranks of ``data`` alternate
    there: experts by themselves would have to gather them, and would compute all of them on each
    rank. The weights of tokens, and so their router, have the gradients of this rank's parts.
    """
    pattern = "|".join(map(re.escape, mixtures))
    placements: dict[str, Placement] = dict.fromkeys(axes.data, Shard(0))
    if axes.data:
        plan.annotate(rf"({pattern})\..*\.grad", [Partial()] * len(axes.data), axes.data)
    if axes.tp is not None:
        placements[axes.tp] = Partial()
        for name in _unsharded(model, mixtures, rules):
            plan.annotate(rf"{re.escape(name)}\.grad", Partial(), axes.tp)
        plan.redistribute(f"({pattern}).<out:0>", Partial(), Replicate(), axes.tp)
    along: dict[str, Placement] = placements or dict.fromkeys(plan.axes, Replicate())
    plan.local(f"({pattern})", [*along.values()], [*along])


def _add_sharded_experts(
    plan: PlanEntries, model: nn.Module, rules: Mapping[str, str], ep: str
) -> None:
    """Shards the parameters of experts by number."""
    names = [name for name, _ in model.named_parameters()]
    for rule, style in rules.items():
        if style not in (_DISPATCHED, _BY_NUMBER):
            _refuse(rule, style, model, (_DISPATCHED, _BY_NUMBER))
        elif style == _BY_NUMBER and any(re.fullmatch(_pattern(rule), name) for name in names):
            plan.shard(_pattern(rule), Shard(0), ep)


def _add_experts(
    plan: PlanEntries,
    pattern: str,
    experts: Sequence[nn.Module],
    axes: TransformersAxes,
    *,
    parts: bool,
) -> None:
    """Runs experts on local tensors.

    Args:
        plan: to which entries are added.
        pattern: of the experts' paths.
        experts: the modules.
        axes: of the plan's mesh; along ``ep`` each rank has some of the experts.
        parts: whether each rank along ``tp`` has a part of every expert, and outputs are summed.
    """
    whole, part = Replicate(), Partial()
    arguments = [[*inspect.signature(module.forward).parameters] for module in experts]
    (choices,), (weights,) = ({each[at] for each in arguments} for at in (1, 2))
    summed = [axes.tp] if parts and axes.tp is not None else []
    copies = [axis for axis in axes.data if axis != axes.ep]
    if copies:
        plan.annotate(rf"{pattern}\..*\.grad", [part] * len(copies), copies)
    for axis in summed:
        for argument in ("0", weights):  # tokens, and the weights of their choices
            plan.redistribute(
                f"{pattern}.<in:{argument}>", whole, whole, axis, grad_src=part, grad_dst=whole
            )
        plan.redistribute(f"{pattern}.<out>", part, whole, axis)
    if axes.ep is not None:
        plan.dispatch(
            f"{pattern}.<in:{choices}>", Shard(0), axes.ep, weights=weights, count="num_experts"
        )
        plan.local(pattern, [Shard(0), *[part] * len(summed)], [axes.ep, *summed])
        return
    along = summed or copies or plan.axes
    placement = part if summed else Shard(0) if copies else whole
    plan.local(pattern, [placement] * len(along), along)


def _add_fsdp_plan(
    plan: PlanEntries,
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    axes: TransformersAxes,
    experts: Sequence[str],
) -> None:
    """Applies fully_shard to the modules that a model names, and to the model.

    Tied parameters are left to the model's own group, which is gathered from the first of their
    uses to the last. Experts that are sharded by number are sharded further along the other axes.
    """
    if axes.ep in axes.fsdp and (others := [axis for axis in axes.fsdp if axis != axes.ep]):
        for path in experts:
            plan.fully_shard(path, others, flat=len(others) > 1)
    users: Counter[int] = Counter(
        id(param) for module in modules.values() for param in module.parameters(recurse=False)
    )
    for rule, style in _rules(
        model, "_fsdp_plan", "fully sharded data parallelism", "fsdp"
    ).items():
        matched = _matching(rule, modules)
        if style not in _RESHARDS:
            _refuse(rule, style, model, _RESHARDS)
        own = [param for module in matched.values() for param in module.parameters()]
        if own and all(users[id(param)] == 1 for param in own):
            plan.fully_shard(
                _pattern(rule), axes.fsdp, flat=len(axes.fsdp) > 1,
                reshard_after_forward=_RESHARDS[style],
            )  # fmt: skip
    plan.fully_shard("", axes.fsdp, flat=len(axes.fsdp) > 1)


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


def _refuse(rule: str, style: str, model: nn.Module, known: Iterable[str]) -> None:
    """Raises ValueError where a rule matches anything in the model."""
    named = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    found = [name for name in named if re.fullmatch(_pattern(rule), name)]
    if found and style in _REFUSED:
        raise ValueError(
            f"from_tp_plan: {style!r} of {rule!r} ({found[0]}) of {type(model).__name__} is not "
            f"supported: {_REFUSED[style]}"
        )
    if found:
        raise ValueError(
            f"from_tp_plan: expected a style among {', '.join(known)}, got {style!r} for {rule!r} "
            f"({found[0]}) of {type(model).__name__}; write a plan for this model"
        )
