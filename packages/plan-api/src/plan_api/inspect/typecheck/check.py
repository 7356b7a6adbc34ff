"""Runs a step in static mode under spmd_types' checker."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

from plan_api.inspect.typecheck.types import PlanTypes, TypedOperators
from plan_api.installation import Installed, installed
from plan_api.lowering.ir import gradient_placements
from plan_api.lowering.lower import lower
from plan_api.ops.expert_dispatch import AUTOGRAD_FUNCTIONS
from plan_api.plan import Plan
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.failed_call import unfinished_calls
from plan_api.spec.axes import axis_names
from plan_api.static.comparison import StaticError, preserved_state
from plan_api.static.generation.entries import split_policies
from plan_api.static.generation.example_step import ExampleStep
from plan_api.static.local_params import LocalParam
from plan_api.static.validate import context_parallel_sites

__all__ = ["typecheck"]

_OLDEST = "0.2.3"


def typecheck(
    plan: Plan,
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    fake: bool = True,
) -> None:
    """Checks a plan for static mode by types, without computing a number.

    A step runs in static mode under the checker of spmd_types. Parameters, inputs and what the plan
    redistributes have the types of their placements along each axis of the mesh with more than one
    rank: R (replicated, with a gradient that is to be reduced), I (replicated, as its gradient), V
    (sharded) or P (Partial). Operators propagate the types of local tensors; where a site of the
    plan or an operator gets a tensor of another type, the plan is wrong. The types of gradients are
    those of backward, so backward does not run.

    Types do not tell dims apart, and take a Partial tensor that no operator has reduced for one
    whose ranks have different shards: a wrong dim is found by `Installed.check`, which compares
    numbers with Eager.

    Args:
        plan: for static mode, as the zoo's and those of `generate_static`; it is not changed. Its
            entries of `Plan.fully_shard` are not applied, but reduce gradients.
        model: unmodified; it is not changed.
        example_inputs: of one step, as a tuple of arguments or a dict of keyword arguments; the
            same on all ranks of the mesh. A scalar among the outputs is taken as the loss.
        fake: whether to run on FakeTensors, which take no memory, and to send nothing; model and
            inputs may be on ``meta``. Models whose code depends on values, such as a loop over the
            experts that tokens chose, need ``fake=False``.

    Raises:
        StaticError: types do not match; names the site, the entry of the plan and a remedy.
        ValueError: the plan does not fit the model or static mode, or the model does not take these
            inputs; or the plan has modules that run on DTensors (`Plan.eager`).
        ImportError: spmd_types is not installed, or older than 0.2.3.
    """
    spmd = _spmd_types()
    step = ExampleStep.checked("typecheck", plan, model, example_inputs, fake, ())
    lowered = lower(plan, step.model, mode="static")
    if sharded := next(context_parallel_sites(lowered), None):
        raise ValueError(
            f"typecheck: expected a plan without context parallelism, whose sends have no types in "
            f"spmd_types, got {sharded}; check the plan without it"
        )
    if on_dtensors := lowered.eager:
        raise ValueError(
            f"typecheck: expected modules on local tensors, got {', '.join(on_dtensors)} on "
            f"DTensors, which have placements instead of types; check a plan without eager()"
        )
    types = PlanTypes(spmd, plan.mesh)
    placed, _ = split_policies(plan)
    typed = step.parallelized(placed, "static", types)
    _type_state(typed, types)
    args, kwargs = (
        map_tensors(one, lambda tensor: types.assign(tensor.view_as(tensor), {}))
        for one in (step.args, dict(step.kwargs))
    )
    names = {module: name for name, module in typed.named_modules()}
    try:
        with (
            preserved_state(typed),
            torch.enable_grad(),
            spmd.set_current_mesh(dict(types.axes)),
            _checker(),
            TypedOperators(types),
        ):
            _check_outputs(typed(*args, **kwargs), types)
    except (ValueError, RuntimeError, IndexError) as error:  # of types, or of shapes
        calls = unfinished_calls(error, names)
        raise StaticError(f"typecheck: {error}", calls[-1].path if calls else "") from error


def _spmd_types() -> Any:
    """Returns the module spmd_types.

    Raises:
        ImportError: it is not installed, or too old.
    """
    remedy = "pip install 'plan-api[types]'"
    try:
        version = importlib.metadata.version("spmd-types")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"typecheck: expected spmd-types, got none: {remedy}") from error
    if TorchVersion(version) < _OLDEST:
        raise ImportError(f"typecheck: expected spmd-types>={_OLDEST}, got {version}: {remedy}")
    spmd = importlib.import_module("spmd_types")
    for function in AUTOGRAD_FUNCTIONS:  # each rank sends its rows: V as before
        spmd.register_local_autograd_function(function)
    return spmd


def _checker() -> Any:
    return importlib.import_module("spmd_types.checker").typecheck()


def _type_state(model: nn.Module, types: PlanTypes) -> None:
    """Types what modules have instead of their parameters and buffers."""
    parts = installed(model)
    gradients = gradient_placements(parts.lowered.sites)
    for one in _local_params(parts):
        placements = zip(axis_names(one.param.device_mesh), one.param.placements, strict=True)
        of_gradient = gradients.get(one.name, {})
        types.names[id(one.tensor)] = one.name
        types.assign(
            one.tensor,
            {axis: types.type_of(placed, of_gradient.get(axis)) for axis, placed in placements},
        )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                module._buffers[name] = types.assign(buffer.view_as(buffer), {})


def _local_params(parts: Installed) -> list[LocalParam]:
    """Returns what modules have instead of their parameters.

    Raises:
        ValueError: a parameter has phases, so modules get a new tensor at each use.
    """
    found = [leaf for leaf in parts._leaves if isinstance(leaf, LocalParam)]
    if len(found) < len(parts._leaves):
        raise ValueError(
            "typecheck: expected parameters without phases, got some that are unsharded while "
            "their module runs; check the plan without entries that name a phase, as the types of "
            "what modules compute are the same"
        )
    return found


def _check_outputs(outputs: Any, types: PlanTypes) -> None:
    """Checks that the loss and other outputs are those of one device, or placed by an entry.

    Raises:
        ValueError: a rank has a part of an output, and no entry says which; or backward, which
            begins with 1 on every rank, would not begin with the gradient of one device.
    """
    spmd = types.spmd
    for one in tree_leaves(outputs):
        if not isinstance(one, torch.Tensor):
            continue
        placed = {axis for output, axes in types.outputs if output is one for axis in axes}
        for axis, found in types.types_of(one).items():
            if found in (spmd.V, spmd.P) and axis not in placed:
                remedy = (
                    f"redistribute('<out>', Partial(), Replicate(), {axis!r})"
                    if one.numel() == 1
                    else f"annotate('<out>', Shard(dim), {axis!r})"
                )
                raise ValueError(
                    f"expected outputs of the model that are replicated or placed by an entry, got "
                    f"{types.described(one)}: static mode would return a rank's part as a plain "
                    f"tensor; add {remedy}, with the name of the output, as <out:loss>"
                )
            if found is spmd.R and one.requires_grad and one.numel() == 1:
                raise ValueError(
                    f"expected a loss with a gradient that is the same on all ranks, type I along "
                    f"{axis!r}, got type R: the ranks' gradients of 1 would be added up; where it "
                    f"is computed replicate tensors with grad_src=Replicate()"
                )
