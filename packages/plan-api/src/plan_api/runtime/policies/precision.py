"""Makes linear layers compute in low precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import ModulePolicy, QuantizedGather, Schedule
from plan_api.lowering.operands import recipes_of_weights
from plan_api.lowering.precision import resolve_precision
from plan_api.ops.low_precision.dtensors import feature_groups, low_precision_linear_of_dtensors
from plan_api.ops.low_precision.experts import (
    expert_weights,
    in_low_precision,
    is_experts,
)
from plan_api.ops.low_precision.linear import FeatureGroups, LowPrecision, low_precision_linear
from plan_api.ops.low_precision.quantize import Quantized, amax_of, quantize, scales_of
from plan_api.ops.low_precision.recipes import Recipe, check_recipe
from plan_api.ops.low_precision.tokens import TokenGather
from plan_api.runtime.policies.replaced_forward import ReplacedForward, forward_of
from plan_api.spec.entry import Entry, EntryKind
from plan_api.spec.path import parse_path

__all__ = [
    "install_precision", "precisions_on", "quantize_weights", "token_gathers", "use_low_precision",
]  # fmt: skip


def use_low_precision(
    model: nn.Module, path: str, recipe: Recipe, *, device: str | None = None
) -> tuple[RemovableHandle, ...]:
    """Makes linear layers and experts of a model without a plan compute as `Plan.precision` says.

    Parameters may be those of one device, or be gathered by FSDP or copied by DDP, before or after
    this call.

    Args:
        model: any; the ``forward`` of its linear layers and experts is replaced.
        path: see `Plan.precision`.
        recipe: see `Plan.precision`.
        device: the type of the device that the model will run on; None: that of its parameters.

    Returns:
        handles that restore the ``forward`` of each of them.

    Raises:
        ValueError: as `Plan.precision` and `parallelize`.
    """
    what = f"use_low_precision({path!r})"
    check_recipe(what, recipe)
    if device is None:
        device = next((param.device.type for param in model.parameters()), "cpu")
    found = _named_layers(model, path, recipe)
    precision = LowPrecision.on(what, recipe, device)
    forward = _forward(precision, FeatureGroups())
    handles = []
    for module in map(model.get_submodule, found):
        if is_experts(module):
            groups = dict.fromkeys(expert_weights(module), FeatureGroups())
            handles.append(_replaced_experts(module, precision, groups))
        else:
            handles.append(ReplacedForward(module, forward))
    return tuple(handles)


@torch.no_grad()
def quantize_weights(model: nn.Module, path: str, recipe: Recipe) -> dict[str, Quantized]:
    """Quantizes the weights of linear layers as their outputs' products do, to export them.

    Experts that the pattern names are left out, as their weights have three dims.

    Args:
        model: of plain tensors; it is not changed.
        path: see `Plan.precision`.
        recipe: see `Plan.precision`.

    Returns:
        float8 elements (N, K) and scales of each weight, by its first name.

    Raises:
        ValueError: as `use_low_precision`; or another module uses a weight, which may not be one
            with the recipe.
    """
    what = f"quantize_weights({path!r})"
    check_recipe(what, recipe)
    found = {
        name: policy
        for name, policy in _named_layers(model, path, recipe).items()
        if not is_experts(model.get_submodule(name))
    }
    weights = recipes_of_weights(model, found)
    first_names = {id(param): name for name, param in model.named_parameters()}
    quantized: dict[str, Quantized] = {}
    for layer in found:
        weight = model.get_submodule(layer).get_parameter("weight")
        name = first_names[id(weight)]
        if name not in weights:
            raise ValueError(
                f"{what}: expected weights of linear layers with the recipe only, got that of "
                f"{layer}, which another module has as {name}; leave {layer} out of the pattern"
            )
        if name not in quantized:
            scaling = recipe.output.right
            scales = scales_of(amax_of(weight, scaling), scaling)
            quantized[name] = quantize(weight, scaling, scales)
    return quantized


def _named_layers(model: nn.Module, path: str, recipe: Recipe) -> dict[str, ModulePolicy]:
    entry = Entry(
        EntryKind.PRECISION, parse_path(path, True), (), (), options=(("recipe", recipe),)
    )
    return resolve_precision([entry], model)


def precisions_on(
    mesh: DeviceMesh, policies: Mapping[str, ModulePolicy]
) -> dict[str, LowPrecision]:
    """Returns the recipes of modules on the device of a mesh, by path.

    Args:
        mesh: of a plan.
        policies: with recipes, by the path of their module.

    Raises:
        ValueError: a recipe requires kernels, and the device has none.
    """
    return {
        path: LowPrecision.on(policy.description, policy.value, mesh.device_type)
        for path, policy in policies.items()
    }


def token_gathers(
    gathers: Iterable[QuantizedGather], mesh: DeviceMesh
) -> dict[tuple[str, int | str], TokenGather]:
    """Returns what gathers the inputs of modules in float8, by path and argument.

    Args:
        gathers: of a plan.
        mesh: of the plan.
    """
    return {
        (one.path, one.index): TokenGather(one.what, one.recipe, mesh.get_group(one.axis), one.dim)
        for one in gathers
    }


def install_precision(
    model: nn.Module,
    precisions: Mapping[str, LowPrecision],
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
) -> Iterator[ReplacedForward]:
    """Replaces the ``forward`` of linear layers and experts.

    Inputs of linear layers are DTensors or local tensors, those of experts are local tensors.

    Args:
        model: of the plan.
        precisions: of linear layers and experts, by path.
        schedules: of parameters, by their first names.
        mesh: of the plan.
    """
    first_names = {id(param): name for name, param in model.named_parameters()}
    replaced: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def placements(param: nn.Parameter) -> tuple[Placement, ...]:
        schedule = schedules.get(first_names[id(param)])
        return (Replicate(),) * mesh.ndim if schedule is None else schedule.run

    for path, precision in precisions.items():
        module = model.get_submodule(path)
        if is_experts(module):
            groups = {
                name: feature_groups(mesh, placements(module.get_parameter(name)), first_dim=1)
                for name in expert_weights(module)
            }
            yield _replaced_experts(module, precision, groups)
            continue
        key = precision, feature_groups(mesh, placements(module.get_parameter("weight")))
        # One function for all modules of a kind, so that torch.compile compiles it once.
        if key not in replaced:
            replaced[key] = _forward(*key)
        yield ReplacedForward(module, replaced[key])


def _replaced_experts(
    module: nn.Module, precision: LowPrecision, groups: Mapping[str, FeatureGroups]
) -> ReplacedForward:
    own = forward_of(module)

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with in_low_precision(module, precision, groups):
            return own(module, *args, **kwargs)

    return ReplacedForward(module, forward)


def _forward(precision: LowPrecision, groups: FeatureGroups) -> Callable[..., torch.Tensor]:
    def forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's
        weight: torch.Tensor = module.weight
        if isinstance(weight, DTensor):
            return low_precision_linear_of_dtensors(input, weight, module.bias, precision)
        return low_precision_linear(input, weight, module.bias, precision, groups)

    return forward
