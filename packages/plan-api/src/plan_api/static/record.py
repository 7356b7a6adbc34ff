"""One step of Eager, and how every tensor was placed in it, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from plan_api.eager import install_eager
from plan_api.lowering.ir import Lowered, SiteStep
from plan_api.lowering.model_names import positional_names
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.hooks import SiteCoverage
from plan_api.runtime.redistribute import Redistribution
from plan_api.static.compare import gradients, kept

__all__ = ["Call", "Passed", "Record", "record"]

Placements: TypeAlias = tuple[Placement, ...]


@dataclass
class Passed:
    """A tensor on its way through a site, or into or out of a module.

    Attributes:
        before: how it came.
        after: how it went on.
        back_before: how its gradient came back; None if none did.
        back_after: how that went on.
    """

    before: Placements
    after: Placements
    back_before: Placements | None = None
    back_after: Placements | None = None


@dataclass(frozen=True)
class Call:
    """A call of a function of torch in a module's own code.

    Attributes:
        path: of the module.
        name: of the function.
        number: of the call, among those of the function in one call of the module.
        given: how the first tensor was placed.
        sizes: dims whose size the code says, with the placements of the result.
        result: how the result was placed.
    """

    path: str
    name: str
    number: int
    given: Placements
    sizes: tuple[int, ...] = ()
    result: Placements = ()


@dataclass
class Record:
    """What a step has shown.

    Attributes:
        sites: tensors that passed a site, by its name and the step's index.
        inputs: of modules without children, and of those that stay on DTensors, by path and
            argument.
        outputs: of these, as they made them.
        params: how gradients of parameters were placed.
        calls: of functions whose result depends on the whole.
        results: how what the model returns is placed, by its name or number.
    """

    sites: dict[tuple[str, int | str], Passed] = field(default_factory=dict)
    inputs: dict[tuple[str, int | str], Passed] = field(default_factory=dict)
    outputs: dict[str, Passed] = field(default_factory=dict)
    params: dict[str, Placements] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    results: dict[str, Placements] = field(default_factory=dict)


def record(
    model: nn.Module,
    lowered: Lowered,
    mesh: DeviceMesh,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Record:
    """Runs a model in Eager, forward and backward; all ranks of the mesh call.

    Args:
        model: of DTensors, without hooks.
        lowered: the plan, for this model.
        mesh: the plan's.
        args: of the model.
        kwargs: of the model.
    """
    seen = Record()

    def mover(step: SiteStep, mesh: DeviceMesh, site: str) -> Redistribution:
        return _Recording(step, mesh, site, seen)

    handles = [
        *install_eager(
            model, lowered.sites, lowered.schedules, lowered.indices, mesh, SiteCoverage([]), mover
        )
    ]
    running = [""]
    mode = _Calls(running, seen)
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(mode.entering(name), prepend=True),
            module.register_forward_hook(mode.leaving, always_call=True),
        ]
        alone = next(module.children(), None) is None and module._parameters
        if alone or name in lowered.eager:
            handles += _watch(name, module, seen)
    try:
        with kept(model), torch.enable_grad():
            named = {n: param for n, param in model.named_parameters() if param.requires_grad}
            with mode:
                result = model(*args, **kwargs)
            grads = gradients(result, list(named.values()))
    finally:
        for handle in handles:
            handle.remove()
    for name, grad in zip(named, grads, strict=True):
        if isinstance(grad, DTensor):
            seen.params[name] = grad.placements
    parts = result.items() if isinstance(result, Mapping) else [("0", result)]
    for name, part in parts:
        if isinstance(part, DTensor):
            seen.results[str(name)] = part.placements
    return seen


class _Recording(Redistribution):
    """A mover that tells what passes it."""

    settled = property(lambda _: None, lambda *_: None)

    def __init__(self, step: SiteStep, mesh: DeviceMesh, site: str, seen: Record) -> None:
        super().__init__(step, mesh, site)
        self._at, self._seen = (site, step.index), seen

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        placed = isinstance(tensor, DTensor)
        before = tensor.placements if isinstance(tensor, DTensor) else self._plain_placements
        passed = Passed(before, before)
        if placed and tensor.requires_grad:
            tensor = _Watched.apply(tensor, passed, "back_after")  # type: ignore[no-untyped-call]
        moved: Any = super().__call__(tensor)
        passed.before, passed.after = _sums(passed.before), moved.placements
        self._seen.sites[self._at] = passed
        if moved.requires_grad:
            moved = _Watched.apply(moved, passed, "back_before")  # type: ignore[no-untyped-call]
        return moved  # type: ignore[no-any-return]


def _sums(placements: Placements) -> Placements:
    """What an embedding of a cut table gives is a sum like any other."""
    return tuple(Partial(one.reduce_op) if isinstance(one, Partial) else one for one in placements)


class _Watched(torch.autograd.Function):
    """Nothing, but that it writes down how the gradient is placed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, passed: Passed, name: str) -> torch.Tensor:
        ctx.passed, ctx.name = passed, name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        if isinstance(grads[0], DTensor):
            setattr(ctx.passed, ctx.name, grads[0].placements)
        return grads[0], None, None


def _watch(name: str, module: nn.Module, seen: Record) -> list[Any]:
    places = positional_names(module)

    def look(at: int | str) -> Callable[[torch.Tensor], torch.Tensor]:
        def looked(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            passed = seen.inputs[name, at] = Passed(tensor.placements, tensor.placements)
            if not tensor.requires_grad:
                return tensor
            return _Watched.apply(tensor, passed, "back_after")  # type: ignore[no-any-return, no-untyped-call]

        return looked

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(map_tensors(one, look(at)) for at, one in enumerate(args))
        named = {
            key: map_tensors(one, look(places.index(key) if key in places else key))
            for key, one in kwargs.items()
        }
        return args, named

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, DTensor):
            return None
        passed = seen.outputs[name] = Passed(output.placements, output.placements)
        if not output.requires_grad:
            return None
        return _Watched.apply(output, passed, "back_before")  # type: ignore[no-untyped-call]

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, prepend=True),
    ]


_FUNCTIONS = {
    getattr(place, name): name
    for name in (
        "dropout", "cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "embedding", "view", "reshape",
        "split",
    )
    for place in (F, torch, torch.Tensor)
    if hasattr(place, name)
}  # fmt: skip


class _Calls(TorchFunctionMode):
    def __init__(self, running: list[str], seen: Record) -> None:
        super().__init__()
        self._running, self._seen = running, seen
        self._counts: list[Counter[str]] = [Counter()]

    def entering(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._running.append(name)
            self._counts.append(Counter())

        return enter

    def leaving(self, *_: Any) -> None:
        self._running.pop()
        self._counts.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = _FUNCTIONS.get(func)
        # Of an embedding, what is cut is the table.
        first = args[name == "embedding"] if len(args) > (name == "embedding") else None
        if name is None or not isinstance(first, torch.Tensor):
            return result
        number = self._counts[-1][name]
        self._counts[-1][name] += 1
        if isinstance(first, DTensor):
            sizes = _said(name, args[1:], kwargs or {})
            one = result[0] if isinstance(result, (tuple, list)) else result
            placed = one.placements if isinstance(one, DTensor) else ()
            path = self._running[-1]
            given = _simplest(first.placements)
            self._seen.calls.append(Call(path, name, number, given, sizes, _simplest(placed)))
        return result


def _simplest(placements: Placements) -> Placements:
    """ragged-shard's placement of one part is a Shard."""
    return tuple(
        Shard(one.dim) if getattr(one, "interleaves", 0) == 1 else one  # type: ignore[attr-defined]
        for one in placements
    )


def _said(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """The dims of which code says the size; of `split` that which it cuts."""
    if name == "split":
        return (kwargs.get("dim", args[1] if len(args) > 1 else 0),)
    if name not in ("view", "reshape"):
        return ()
    sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
    return tuple(
        dim for dim, size in enumerate(sizes) if isinstance(size, int) and size not in (-1, 1)
    )
