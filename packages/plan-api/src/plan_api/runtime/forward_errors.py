"""Appends to errors in a module's forward the module, the expression and the plan's entries.

No module is wrapped: a hook of the model, which torch calls when a call of the model fails, reads
the traceback. Its innermost module call gives the location, the failed expression gives the
tensors, and the origin of these gives the entry that the plan lacks.
"""

from __future__ import annotations

import functools
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api._compat import is_uneven_view_error
from plan_api.lowering.ir import OpKind, Site, SiteStep
from plan_api.lowering.model_names import is_inside
from plan_api.runtime.error_context import (
    append_message,
    describe_step,
    describe_tensors,
    is_annotated,
)
from plan_api.runtime.failed_call import (
    FailedExpression,
    ModuleCall,
    ends_call_of,
    expression_of,
    tensors_of,
    unfinished_calls,
)
from plan_api.spec.path import generalize_numbers, path_code
from plan_api.spec.placements import placement_code

__all__ = ["install_forward_errors"]

_GENERATE = "generate"  # of transformers
_CACHE = ("past_key_values", "use_cache")  # arguments of it
_MAX_ENTRIES = 3  # in a message


def install_forward_errors(
    model: nn.Module, sites: Sequence[Site], axes: Sequence[str], mode: str
) -> Iterator[RemovableHandle]:
    """Makes errors in forward name the module, the tensors and the entries.

    Args:
        model: any; its ``generate`` is wrapped, if it has one.
        sites: of the plan, for this model.
        axes: of the plan's mesh.
        mode: as of `parallelize`.
    """

    def hook(module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():  # torch calls the hook on success only
            return
        error = sys.exception()
        if isinstance(error, Exception) and ends_call_of(error, module) and not is_annotated(error):
            names = {one: name for name, one in module.named_modules()}
            _annotate(error, _ModelPlan(names, sites, axes, mode))

    yield model.register_forward_hook(hook, always_call=True)
    if mode == "eager" and callable(getattr(model, _GENERATE, None)):
        yield _AnnotatedGenerate(model)


@dataclass(frozen=True)
class _ModelPlan:
    """A model and its plan."""

    names: Mapping[nn.Module, str]
    sites: Sequence[Site]
    axes: Sequence[str]
    mode: str

    def pattern(self, path: str) -> str:
        """Returns a pattern of a module and others of its class with other numbers in the path."""
        pattern = generalize_numbers(path)
        classes = {
            type(one) for one, name in self.names.items() if re.fullmatch(pattern, name) is not None
        }
        return pattern if len(classes) == 1 else re.escape(path)

    def steps_at(self, path: str) -> Iterator[SiteStep]:
        """Returns the plan's steps at one module."""
        return (step for site in self.sites if site.path == path for step in site.steps)


def _annotate(error: Exception, model: _ModelPlan) -> None:
    calls, failed = unfinished_calls(error, model.names), expression_of(error)
    if not calls or failed is None:
        return
    inner = calls[-1]
    lines = [f"in {inner}, {failed}"]
    if placed := _described_steps(model.steps_at(inner.path)):
        lines.append(f"the plan says of {inner.path or 'the model'}: {placed}")
    if model.mode == "static":
        lines += _static_size_remedy(str(error))
    elif "mixed torch.Tensor and DTensor" in str(error):
        lines += _mixed_tensor_remedy(model, calls, failed)
    elif is_uneven_view_error(str(error)):
        lines += _uneven_remedy(model, inner, failed)
    append_message(error, "\n".join(lines))


def _described_steps(steps: Iterable[SiteStep]) -> str:
    lines = list(dict.fromkeys(f"{step.description}: {describe_step(step)}" for step in steps))
    more = f"; and {len(lines) - _MAX_ENTRIES} more" if len(lines) > _MAX_ENTRIES else ""
    return "; ".join(lines[:_MAX_ENTRIES]) + more


def _static_size_remedy(message: str) -> list[str]:
    """Returns the remedy in static mode, where code with global sizes gets local tensors."""
    if "size" not in message and "shape" not in message:
        return []
    return [
        "modules run on local tensors in static mode: global sizes in their code need entries, "
        "which generate_static(plan, model, example_inputs) finds"
    ]


def _mixed_tensor_remedy(
    model: _ModelPlan, calls: Sequence[ModuleCall], failed: FailedExpression
) -> list[str]:
    """Returns for each plain tensor the entry that makes it a DTensor."""
    entries: list[str] = []
    remedies: list[str] = []
    for name, value in failed.variables.items():
        for tensor in filter(_is_plain, tensors_of(value)):
            entering = _argument_of(calls, tensor)
            owner, _, attribute = name.rpartition(".")
            if entering is not None:
                entries.append(_missing_entry(model, *entering))
            elif owner == "self" and isinstance(failed.owner, nn.Module):
                remedies.append(
                    f"{name} is no parameter or buffer that parallelize() has placed: register it, "
                    f"as by register_buffer({attribute!r}, ...), before parallelize()"
                )
            elif owner == "self":
                remedies.append(_unreachable_remedy(name, failed.owner, calls))
    if not entries and not remedies:  # created there, or derived from an argument
        inner = calls[-1]
        for tensor in filter(_is_plain, tensors_of([*inner.arguments.values()])):
            if (entering := _argument_of(calls, tensor)) is not None:
                entries.append(_missing_entry(model, *entering))
        path = path_code(model.pattern(inner.path))
        replicated = _code([Replicate()] * len(model.axes))
        entries.append(f"plan.factory({path}, {replicated})  # for tensors created in its forward")
    if entries:
        entries.insert(
            0, "expected DTensors, got a torch.Tensor that no entry of the plan places; add:"
        )
    return [*dict.fromkeys(entries), *dict.fromkeys(remedies)]


def _unreachable_remedy(name: str, owner: object, calls: Sequence[ModuleCall]) -> str:
    reason = (
        f"{name} is a torch.Tensor of a {type(owner).__name__}, which no entry of a plan reaches"
    )
    if any(one in call.arguments for call in calls for one in _CACHE):
        reason += ": pass use_cache=False, training reads no cache"
    return (
        f"{reason}; or use parallelize(model, plan, mode='static'), where modules run on plain "
        f"tensors"
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether torch refuses it in an operator with DTensors; it accepts scalars."""
    return not isinstance(tensor, DTensor) and (tensor.numel() != 1 or tensor.ndim > 1)


def _argument_of(
    calls: Sequence[ModuleCall], tensor: torch.Tensor
) -> tuple[ModuleCall, str] | None:
    """Finds the outermost module that takes a tensor, and the argument's name."""
    for call in calls:
        for name, value in call.arguments.items():
            if any(one is tensor for one in tensors_of(value)):
                return call, name
    return None


def _missing_entry(model: _ModelPlan, call: ModuleCall, name: str) -> str:
    """Returns the entry for an argument: sharded like others of its size, or replicated."""
    path = path_code(model.pattern(call.path), f"<in:{name}>")
    plain = [one for one in tensors_of(call.arguments[name]) if _is_plain(one)]
    placements: list[Placement] = [Replicate()] * len(model.axes)
    for other in tensors_of([*call.arguments.values()]):
        for axis, placement in enumerate(other.placements if isinstance(other, DTensor) else ()):
            if isinstance(placement, Shard) and all(
                one.ndim > placement.dim and one.shape[placement.dim] == other.shape[placement.dim]
                for one in plain
            ):
                placements[axis] = placement
    return f"plan.shard({path}, {_code(placements)})"


def _uneven_remedy(model: _ModelPlan, inner: ModuleCall, failed: FailedExpression) -> list[str]:
    """Returns the steps that shard a dim viewed as units, and the entries that replicate it."""
    sharded = next((operand for operand in failed.operands if isinstance(operand, DTensor)), None)
    if sharded is None:
        return []
    steps: list[SiteStep] = []
    entries: list[str] = []
    for site in model.sites:
        if not is_inside(site.path, inner.path):
            continue
        module = inner.module.get_submodule(site.path[len(inner.path) :].lstrip("."))
        for step in site.steps:
            for axis, placement in zip(model.axes, sharded.placements, strict=True):
                if isinstance(placement, Shard) and _shards_output(
                    module, step, axis, sharded.shape[placement.dim]
                ):
                    path = path_code(model.pattern(site.path), "<out>")
                    steps.append(step)
                    entries.append(f'plan.shard({path}, Replicate(), "{axis}")')
    if not entries:
        return []
    return [
        f"its operand is {describe_tensors(sharded)}, by {_described_steps(steps)}; expected an "
        f"axis whose size divides the number of units, such as heads, that it is viewed as; use "
        f"such a mesh, or add:",
        *dict.fromkeys(entries),
        "with unit= in the entry of the weight, parallelize() checks this before anything runs",
    ]


def _shards_output(module: nn.Module, step: SiteStep, axis: str, size: int) -> bool:
    """Whether a step shards the parameter dim that becomes the last dim of the output."""
    if step.kind is not OpKind.SHARD or axis not in step.moves:
        return False
    shape = getattr(module, step.tensor).shape
    dim = 0 if isinstance(module, nn.Linear) else len(shape) - 1
    return getattr(step.moves[axis].dst, "dim", None) == dim and shape[dim] == size


def _code(placements: Sequence[Placement]) -> str:
    several = ", ".join(map(placement_code, placements))
    return several if len(placements) == 1 else f"[{several}]"


class _AnnotatedGenerate(RemovableHandle):
    """A model's ``generate`` with remedies in errors about DTensors.

    It runs outside modules, on the outputs of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        generate: Callable[..., Any] = getattr(model, _GENERATE)

        @functools.wraps(generate)
        def annotated(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            try:
                return getattr(type(model), _GENERATE)(model, *args, **kwargs)
            except RuntimeError as error:
                failed = expression_of(error)
                if "mixed torch.Tensor and DTensor" in str(error) and failed is not None:
                    append_message(
                        error,
                        f"in generate(), outside of modules, {failed}\nexpected plain outputs of "
                        f"the model, got DTensors, which Eager returns: use parallelize(model, "
                        f"plan, mode='static'), with a plan that replicates batch and logits",
                    )
                raise

        vars(model)[_GENERATE] = types.MethodType(annotated, model)

    def remove(self) -> None:
        """Restores the method of the model's class."""
        model = self._model()
        if model is not None:
            vars(model).pop(_GENERATE, None)
