"""Runs a step in static mode under spmd_types' checker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from plan_api.api import installed
from plan_api.inspect.typecheck.types import PlanTypes, TypeMismatch
from plan_api.plan import Plan
from plan_api.runtime.failed_call import unfinished_calls
from plan_api.static.comparison import StaticError
from plan_api.static.generation.example_step import ExampleStep
from plan_api.static.gradients import gradient_placements
from plan_api.spec.axes import axis_names

__all__ = ["typecheck"]


def typecheck(plan: Plan, model: nn.Module, example_inputs: Any, *, fake: bool = True) -> None:
    import spmd_types as spmd
    from spmd_types.checker import typecheck as checking

    step = ExampleStep.checked("typecheck", plan, model, example_inputs, fake, ())
    types = PlanTypes(spmd, plan.mesh)
    typed = step.parallelized(plan, "static", types)
    _type_state(typed, types)
    for one in tree_leaves((step.args, step.kwargs)):
        if isinstance(one, torch.Tensor):
            types.assign(one, {})
    names = {module: name for name, module in typed.named_modules()}
    try:
        with spmd.set_current_mesh(plan.mesh), checking():
            typed(*step.args, **step.kwargs)
    except (TypeMismatch, spmd.types.SpmdTypeError) as error:
        calls = unfinished_calls(error, names)
        raise StaticError(str(error), calls[-1].path if calls else "") from error


def _type_state(model: nn.Module, types: PlanTypes) -> None:
    parts = installed(model)
    gradients = gradient_placements(parts.lowered.sites)
    for one in parts._local_params:
        of_gradient = gradients.get(one.name, {})
        placements = dict(zip(axis_names(one.param.device_mesh), one.param.placements, strict=True))
        types.assign(
            one.tensor,
            {
                axis: types.type_of(placement, of_gradient.get(axis))
                for axis, placement in placements.items()
            },
        )
    for buffer in model.buffers():
        if type(buffer) is not torch.Tensor and hasattr(buffer, "_local_tensor"):
            continue
        types.assign(buffer, {})
