"""Adds to errors that a module's forward raises the module, the expression and the plan's entries.

No module is wrapped: a hook of the model, which torch calls when a call of the model fails, reads
the traceback. Its innermost call of a module says where, the expression that failed says with which
tensors, and where these come from says which entry the plan lacks.
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

from plan_api.lowering.fuse import Site, Step
from plan_api.lowering.ir import Act, spelled
from plan_api.lowering.resolve import is_inside
from plan_api.runtime.error_context import (
    append_message,
    describe_step,
    describe_tensors,
    is_annotated,
)
from plan_api.runtime.failed_call import (
    Call,
    Expression,
    ends,
    expression_of,
    open_calls,
    tensors_of,
)
from plan_api.spec.path import numbered, quoted

__all__ = ["install_forward_errors"]

_GENERATE = "generate"  # of transformers
_CACHE = ("past_key_values", "use_cache")  # arguments of it
_MOST = 3  # entries that are named


def install_forward_errors(
    model: nn.Module, sites: Sequence[Site], axes: Sequence[str], mode: str
) -> Iterator[RemovableHandle]:
    """Has errors in forward say which module, tensors and entries they are about.

    Args:
        model: any; a ``generate`` of its own is replaced by one that does the same.
        sites: of the plan, for this model.
        axes: of the plan's mesh.
        mode: as of `parallelize`.
    """

    def hook(module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():  # where torch calls it on success alone
            return
        error = sys.exception()
        if isinstance(error, Exception) and ends(error, module) and not is_annotated(error):
            names = {one: name for name, one in module.named_modules()}
            _annotate(error, _Model(names, sites, axes, mode))

    yield model.register_forward_hook(hook, always_call=True)
    if mode == "eager" and callable(getattr(model, _GENERATE, None)):
        yield _Generate(model)


@dataclass(frozen=True)
class _Model:
    """A model and its plan."""

    names: Mapping[nn.Module, str]
    sites: Sequence[Site]
    axes: Sequence[str]
    mode: str

    def pattern(self, path: str) -> str:
        """Of a module, and of those of its class whose paths differ in numbers only."""
        pattern = numbered(path)
        alike = {
            type(one) for one, name in self.names.items() if re.fullmatch(pattern, name) is not None
        }
        return pattern if len(alike) == 1 else re.escape(path)

    def steps_at(self, path: str) -> Iterator[Step]:
        """What the plan does at one module."""
        return (step for site in self.sites if site.path == path for step in site.steps)


def _annotate(error: Exception, model: _Model) -> None:
    calls, failed = open_calls(error, model.names), expression_of(error)
    if not calls or failed is None:
        return
    inner = calls[-1]
    lines = [f"in {inner}, {failed}"]
    if placed := _described_steps(model.steps_at(inner.path)):
        lines.append(f"the plan says of {inner.path or 'the model'}: {placed}")
    if model.mode == "static":
        lines += _of_sizes(str(error))
    elif "mixed torch.Tensor and DTensor" in str(error):
        lines += _of_mixed(model, calls, failed)
    elif "unevenly sharded" in str(error):
        lines += _of_uneven(model, inner, failed)
    append_message(error, "\n".join(lines))


def _described_steps(steps: Iterable[Step]) -> str:
    lines = list(dict.fromkeys(f"{step.said}: {describe_step(step)}" for step in steps))
    more = f"; and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return "; ".join(lines[:_MOST]) + more


def _of_sizes(message: str) -> list[str]:
    """Of static mode, where code that says sizes of the whole meets parts."""
    if "size" not in message and "shape" not in message:
        return []
    return [
        "modules run on this rank's parts of tensors in static mode: sizes that their code says of "
        "the whole need entries, which generate_static(plan, model, example_inputs) finds"
    ]


def _of_mixed(model: _Model, calls: Sequence[Call], failed: Expression) -> list[str]:
    """Where each plain tensor comes from, and the entry by which it would be a DTensor."""
    entries: list[str] = []
    remedies: list[str] = []
    for name, value in failed.named.items():
        for tensor in filter(_is_plain, tensors_of(value)):
            entering = _entering(calls, tensor)
            owner, _, attribute = name.rpartition(".")
            if entering is not None:
                entries.append(_entry(model, *entering))
            elif owner == "self" and isinstance(failed.owner, nn.Module):
                remedies.append(
                    f"{name} is no parameter or buffer that parallelize() has placed: register it, "
                    f"as by register_buffer({attribute!r}, ...), before parallelize()"
                )
            elif owner == "self":
                remedies.append(_of_object(name, failed.owner, calls))
    if not entries and not remedies:  # made there, maybe of what was given
        inner = calls[-1]
        for tensor in filter(_is_plain, tensors_of([*inner.given.values()])):
            if (entering := _entering(calls, tensor)) is not None:
                entries.append(_entry(model, *entering))
        path = quoted(model.pattern(inner.path))
        whole = _spelled([Replicate()] * len(model.axes))
        entries.append(f"plan.factory({path}, {whole})  # for what is made in its forward")
    if entries:
        entries.insert(
            0, "expected DTensors, got a torch.Tensor that no entry of the plan places; add:"
        )
    return [*dict.fromkeys(entries), *dict.fromkeys(remedies)]


def _of_object(name: str, owner: object, calls: Sequence[Call]) -> str:
    reason = (
        f"{name} is a torch.Tensor of a {type(owner).__name__}, which no entry of a plan reaches"
    )
    if any(one in call.given for call in calls for one in _CACHE):
        reason += ": pass use_cache=False, training reads no cache"
    return f"{reason}; or use parallelize(model, plan, mode='static'), where modules run on those"


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether torch refuses it beside DTensors: it takes single numbers."""
    return not isinstance(tensor, DTensor) and (tensor.numel() != 1 or tensor.ndim > 1)


def _entering(calls: Sequence[Call], tensor: torch.Tensor) -> tuple[Call, str] | None:
    """The outermost module that is given a tensor, and the argument's name."""
    for call in calls:
        for name, value in call.given.items():
            if any(one is tensor for one in tensors_of(value)):
                return call, name
    return None


def _entry(model: _Model, call: Call, name: str) -> str:
    """By which an argument would be a DTensor: cut as the others of that length, or whole."""
    path = quoted(model.pattern(call.path), f"<in:{name}>")
    plain = [one for one in tensors_of(call.given[name]) if _is_plain(one)]
    placements: list[Placement] = [Replicate()] * len(model.axes)
    for other in tensors_of([*call.given.values()]):
        for axis, placement in enumerate(other.placements if isinstance(other, DTensor) else ()):
            if isinstance(placement, Shard) and all(
                one.ndim > placement.dim and one.shape[placement.dim] == other.shape[placement.dim]
                for one in plain
            ):
                placements[axis] = placement
    return f"plan.shard({path}, {_spelled(placements)})"


def _of_uneven(model: _Model, inner: Call, failed: Expression) -> list[str]:
    """The parameters by which a dim is cut that a module takes apart, and what makes it whole."""
    cut = next((one for one in failed.operands if isinstance(one, DTensor)), None)
    if cut is None:
        return []
    steps: list[Step] = []
    entries: list[str] = []
    for site in model.sites:
        if not is_inside(site.path, inner.path):
            continue
        module = inner.module.get_submodule(site.path[len(inner.path) :].lstrip("."))
        for step in site.steps:
            for axis, placement in zip(model.axes, cut.placements, strict=True):
                if isinstance(placement, Shard) and _makes(
                    module, step, axis, cut.shape[placement.dim]
                ):
                    path = quoted(model.pattern(site.path), "<out>")
                    steps.append(step)
                    entries.append(f'plan.shard({path}, Replicate(), "{axis}")')
    if not entries:
        return []
    return [
        f"its operand is {describe_tensors(cut)}, by {_described_steps(steps)}; expected an axis "
        f"whose size divides the units that are taken apart there, such as heads; use such a mesh, "
        f"or add:",
        *dict.fromkeys(entries),
        "with unit= in the entry of the weight parallelize() says so before anything runs",
    ]


def _makes(module: nn.Module, step: Step, axis: str, size: int) -> bool:
    """Whether a step cuts a parameter along an axis in the dim that becomes a result's last."""
    if step.act is not Act.SHARD or axis not in step.moves:
        return False
    shape = getattr(module, step.tensor).shape
    made = 0 if isinstance(module, nn.Linear) else len(shape) - 1
    return getattr(step.moves[axis].dst, "dim", None) == made and shape[made] == size


def _spelled(placements: Sequence[Placement]) -> str:
    several = ", ".join(map(spelled, placements))
    return several if len(placements) == 1 else f"[{several}]"


class _Generate(RemovableHandle):
    """A model's ``generate``, whose errors say why DTensors do not go on in it.

    It works outside of modules, on what the model returns.
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
                        f"in generate(), outside of modules, {failed}\nexpected plain results of "
                        f"the model, got DTensors, which Eager returns: use parallelize(model, "
                        f"plan, mode='static'), with a plan that leaves batch and logits whole",
                    )
                raise

        vars(model)[_GENERATE] = types.MethodType(annotated, model)

    def remove(self) -> None:
        """Gives the model that of its class back."""
        model = self._model()
        if model is not None:
            vars(model).pop(_GENERATE, None)
