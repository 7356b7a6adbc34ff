"""Parallelizes a pipeline stage by its part of a plan of the zoo.

Stages send each other the shards that their ranks have, as plain tensors: hidden states are sharded
on the batch, on the sequence by context parallelism, and by sequence parallelism as between layers.
It is imported on use, as other systems need only torch.
"""

import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from integration.pipeline.families import PassedTensor
from integration.pipeline.stage_context import StageContext
from integration.systems.zoo import add_layer_policies, plan_of, precision_error
from plan_api import Plan, installed, lower, parallelize


def check_recipe(context: StageContext) -> None:
    """Refuses a recipe that does not fit a layer of the full model, on whichever stage.

    Ranks of all stages call it before they parallelize one: a rank whose own stages fit would wait
    for the others otherwise.

    Raises:
        UsageError: a recipe of ``--precision`` does not fit a layer.
    """
    if context.layer_policies.precision == "none":
        return
    try:
        lower(_plan_of_model(context), context.model, mode=_mode(context))
    except ValueError as error:
        if (usage_error := precision_error(context.layer_policies, error)) is not None:
            raise usage_error from error
        raise


def parallelize_stage(part: nn.Module, context: StageContext) -> nn.Module:
    """Applies the plan of the full model, whose recipe fits, to a part of it."""
    mode = _mode(context)
    model = parallelize(part, stage_plan(part, context), mode=mode)
    if mode == "static":
        _show_leaves(model)
    return model


def _show_leaves(model: nn.Module) -> None:
    """Makes a stage's ``parameters`` return the leaves of autograd's graph.

    torch's schedules that split the backward look for them there. Optimizers and checkpoints see
    another module (`RankPipeline.model`).
    """
    leaves, alive = installed(model).gradients.leaves, weakref.ref(model)

    def parameters(recurse: bool = True) -> Iterator[Tensor]:
        stage = alive()
        assert stage is not None
        return leaves(nn.Module.parameters(stage, recurse))

    model.parameters = parameters  # type: ignore[method-assign, assignment]


def stage_plan(part: nn.Module, context: StageContext) -> Plan:
    """Returns the plan of a stage, with the placements of what stages pass on."""
    family, following = context.family, _unit_after(context)
    plan = _plan_of_model(context, apart=context.tied)
    plan = plan.for_stage(part, context.model, last=following is None)
    if following is not None:
        for number, tensor in enumerate(family.passed):
            plan.annotate(f"<out:{number}>", boundary(tensor, context, following))
    first = context.units[0]
    if first == context.chain.units[0]:
        return plan
    for tensor in family.passed:
        plan.annotate(f"<in:{tensor.name}>", boundary(tensor, context, first))
    if context.degrees.static and family.sequence_length_matters:
        _gather_sequence(plan, context, first)
    return plan


def _plan_of_model(context: StageContext, apart: Sequence[str] = ()) -> Plan:
    plan = plan_of(
        context.shape, context.mesh, context.degrees, in_pipeline=True, apart=apart,
        precision=context.layer_policies.precision,
    )  # fmt: skip
    add_layer_policies(plan, context.layer_policies, context.shape, len(context.chain.layers))
    return plan


def _mode(context: StageContext) -> Literal["static", "eager"]:
    return "static" if context.degrees.static else "eager"


def boundary(tensor: PassedTensor, context: StageContext, first: str) -> list[Placement]:
    """Returns the placements of a tensor that enters a stage, whose first unit is ``first``."""
    placements: list[Placement] = []
    for axis in context.mesh.mesh_dim_names or ():
        # An axis "cp" of one rank is there for the masks of documents; the plan shards along it.
        if context.mesh[axis].size() == 1 and axis != "cp":
            placements.append(Replicate())
        elif axis in ("dp", "ep"):
            placements.append(Shard(0))
        elif tensor.is_sequence and (axis == "cp" or _shards_sequence(axis, context, first)):
            placements.append(Shard(1))
        else:
            placements.append(Replicate())
    return placements


def _shards_sequence(axis: str, context: StageContext, first: str) -> bool:
    """Whether sequence parallelism has sharded what enters a unit; the first layer shards it."""
    before = (*context.chain.inputs, context.chain.layers[0])
    return axis == "tp" and context.degrees.sp and first not in before


def _gather_sequence(plan: Plan, context: StageContext, first: str) -> None:
    """Gathers hidden states for the model's own code, which has no DTensors in static mode.

    It computes positions from the length of the sequence. The stage's first unit shards them again,
    as the model's first layer does.
    """
    if not _shards_sequence("tp", context, first):
        return
    whole, rest = Replicate(), Shard(1)
    (tensor,) = context.family.passed
    plan.redistribute(f"<in:{tensor.name}>", rest, whole, "tp", grad_src=whole, grad_dst=rest)
    unit = f"{re.escape(first)}.<in>"
    if first != context.chain.units[-1]:
        plan.redistribute(unit, whole, rest, "tp")
        return
    logits = Partial() if context.degrees.loss_parallel else whole
    plan.redistribute(unit, whole, whole, "tp", grad_src=logits, grad_dst=whole)


def _unit_after(context: StageContext) -> str | None:
    """Returns the first unit of the next stage; None for the last stage."""
    units = context.chain.units
    end = units.index(context.units[-1]) + 1
    return units[end] if end < len(units) else None
