"""Traces one step of Eager: how every tensor is placed in it, forward and backward."""

from __future__ import annotations

import inspect
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
from plan_api.lowering.ir import Lowered, OpKind, SiteStep
from plan_api.lowering.model_names import positional_names
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.forward_errors import install_forward_errors
from plan_api.runtime.hooks import SiteCoverage
from plan_api.runtime.redistribute import Redistribution
from plan_api.spec.axes import axis_names
from plan_api.static.comparison import loss_gradients, preserved_state
from plan_api.static.generation.tensor_uses import Place, SharedTensor, TensorUses

__all__ = ["EagerTrace", "FunctionCall", "TensorTrace", "trace_eager_step"]

Placements: TypeAlias = tuple[Placement, ...]
_Argument: TypeAlias = tuple[str, int | str]  # a path or site, and the place or name there


@dataclass
class TensorTrace:
    """Placements of a tensor at a site, or at the input or output of a module.

    Attributes:
        before: how it is placed before the site.
        after: how it is placed after the site.
        grad_before: how its gradient is placed when backward enters the site; None: no gradient.
        grad_after: how its gradient is placed when backward leaves the site; None: no gradient.
    """

    before: Placements
    after: Placements
    grad_before: Placements | None = None
    grad_after: Placements | None = None

    @property
    def reduces_gradient(self) -> bool:
        """Whether a gradient that is Partial before the site is reduced after it."""
        pairs = zip(self.grad_before or (), self.grad_after or (), strict=False)
        return any(before.is_partial() and not after.is_partial() for before, after in pairs)


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function of torch in a module's own code.

    Attributes:
        path: of the module.
        name: of the function.
        number: of the call, among those of the function in one call of the module.
        input_placements: how the first tensor was placed.
        sized_dims: dims whose size is an argument of the call.
        output_placements: how the result was placed.
    """

    path: str
    name: str
    number: int
    input_placements: Placements
    sized_dims: tuple[int, ...] = ()
    output_placements: Placements = ()


@dataclass
class EagerTrace:
    """What a step of Eager has shown.

    Attributes:
        sites: tensors at sites, by the site's name and the step's index.
        inputs: inputs of modules without children, of local regions and of eager fallbacks, by path
            and argument.
        outputs: outputs of the same modules.
        params: how gradients of parameters were placed.
        calls: calls of functions whose result depends on the global tensor.
        results: how the outputs of the model were placed, by name or number.
        tensors: those that require a gradient, with the modules and functions that take them.
        reduced_by_functions: how outputs are placed that are Partial until a function needs them
            reduced, in the order of these functions.
    """

    sites: dict[_Argument, TensorTrace] = field(default_factory=dict)
    inputs: dict[_Argument, TensorTrace] = field(default_factory=dict)
    outputs: dict[str, TensorTrace] = field(default_factory=dict)
    params: dict[str, Placements] = field(default_factory=dict)
    calls: list[FunctionCall] = field(default_factory=list)
    results: dict[str, Placements] = field(default_factory=dict)
    tensors: list[SharedTensor] = field(default_factory=list)
    reduced_by_functions: dict[Place, Placements] = field(default_factory=dict)

    def at_site(self, place: Place) -> TensorTrace | None:
        """Returns what a site of the plan did with the tensor at a place."""
        site = f"{place.path}.{place.hook_point.value}" if place.path else place.hook_point.value
        return self.sites.get((site, place.index))

    def is_reduced(self, shared: SharedTensor) -> bool:
        """Whether a site of the plan or a call in code, which made it, reduces its gradient."""
        if shared.is_reduced_in_code:
            return True
        made = (self.at_site(place) for place in shared.places)
        return any(one is not None and one.reduces_gradient for one in made)


def trace_eager_step(
    model: nn.Module,
    lowered: Lowered,
    mesh: DeviceMesh,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> EagerTrace:
    """Runs a model in Eager, forward and backward; all ranks of the mesh call it.

    Args:
        model: its parameters are DTensors, and it has no hooks of the plan.
        lowered: the plan, lowered for this model.
        mesh: the plan's mesh.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
    """
    trace = EagerTrace()

    def redistribution(step: SiteStep, mesh: DeviceMesh, site: str) -> Redistribution:
        return _TracedRedistribution(step, mesh, site, trace)

    handles = [
        *install_eager(
            model, lowered.sites, lowered.schedules, lowered.indices, mesh, SiteCoverage([]),
            redistribution,
        )
    ]  # fmt: skip
    mode = _FunctionTrace(trace)
    local_regions = {op.path for op in lowered.ops if op.kind is OpKind.LOCAL}
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(mode.enter(name), prepend=True),
            module.register_forward_hook(mode.leave, always_call=True),
        ]
        is_leaf = next(module.children(), None) is None and module._parameters
        if is_leaf or name in lowered.eager or name in local_regions:
            handles += _trace_module(name, module, trace, before_all=name in local_regions)
    uses = TensorUses()
    handles += uses.register_hooks(model)
    handles += install_forward_errors(model, lowered.sites, axis_names(mesh), "eager")
    try:
        with preserved_state(model), torch.enable_grad():
            named = {n: param for n, param in model.named_parameters() if param.requires_grad}
            with mode, uses:
                result = model(*args, **kwargs)
            grads = loss_gradients(result, list(named.values()))
    finally:
        for handle in handles:
            handle.remove()
    for name, grad in zip(named, grads, strict=True):
        if isinstance(grad, DTensor):
            trace.params[name] = grad.placements
    trace.tensors = uses.tensors
    trace.reduced_by_functions = {
        place: _plain_partials(output.placements)
        for place, output in uses.reduced_by_functions.items()
    }
    parts = result.items() if isinstance(result, Mapping) else [("0", result)]
    for name, part in parts:
        if isinstance(part, DTensor):
            trace.results[str(name)] = part.placements
    return trace


class _TracedRedistribution(Redistribution):
    """Eager's redistribution at a site, which traces the tensors that it redistributes."""

    settled = property(lambda _: None, lambda *_: None)

    def __init__(self, step: SiteStep, mesh: DeviceMesh, site: str, trace: EagerTrace) -> None:
        super().__init__(step, mesh, site)
        self._key, self._trace = (site, step.index), trace

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        is_dtensor = isinstance(tensor, DTensor)
        before = tensor.placements if isinstance(tensor, DTensor) else self._plain_placements
        traced = TensorTrace(before, before)
        if is_dtensor and tensor.requires_grad:
            tensor = _TraceGradient.apply(tensor, traced, "grad_after")  # type: ignore[no-untyped-call]
        after: Any = super().__call__(tensor)
        traced.before, traced.after = _plain_partials(traced.before), after.placements
        self._trace.sites[self._key] = traced
        if after.requires_grad:
            after = _TraceGradient.apply(after, traced, "grad_before")  # type: ignore[no-untyped-call]
        return after  # type: ignore[no-any-return]


def _plain_partials(placements: Placements) -> Placements:
    """Replaces the masked Partial of a sharded embedding by a Partial."""
    return tuple(
        Partial(placement.reduce_op) if isinstance(placement, Partial) else placement
        for placement in placements
    )


class _TraceGradient(torch.autograd.Function):
    """Returns its input, and traces how the gradient is placed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, traced: TensorTrace, name: str) -> torch.Tensor:
        ctx.traced, ctx.name = traced, name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        if isinstance(grads[0], DTensor):
            setattr(ctx.traced, ctx.name, grads[0].placements)
        return grads[0], None, None


def _trace_module(
    path: str, module: nn.Module, trace: EagerTrace, *, before_all: bool
) -> list[Any]:
    """Traces the inputs and the output of a module; of a local region, before it is entered."""
    places = positional_names(module)

    def trace_input(index: int | str) -> Callable[[torch.Tensor], torch.Tensor]:
        def traced_input(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            traced = trace.inputs[path, index] = TensorTrace(tensor.placements, tensor.placements)
            if not tensor.requires_grad:
                return tensor
            return _TraceGradient.apply(tensor, traced, "grad_after")  # type: ignore[no-any-return, no-untyped-call]

        return traced_input

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(map_tensors(arg, trace_input(place)) for place, arg in enumerate(args))
        named = {
            key: map_tensors(kwarg, trace_input(places.index(key) if key in places else key))
            for key, kwarg in kwargs.items()
        }
        return args, named

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, DTensor):
            return None
        traced = trace.outputs[path] = TensorTrace(output.placements, output.placements)
        if not output.requires_grad:
            return None
        return _TraceGradient.apply(output, traced, "grad_before")  # type: ignore[no-untyped-call]

    return [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=before_all),
        module.register_forward_hook(after, prepend=True),
    ]


_FUNCTIONS = {
    inspect.unwrap(getattr(namespace, name)): name
    for name in (
        "dropout", "scaled_dot_product_attention", "cross_entropy", "nll_loss", "mse_loss",
        "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "batch_norm", "group_norm", "embedding",
        "view", "reshape", "split",
    )
    for namespace in (F, torch, torch.Tensor)
    if hasattr(namespace, name)
}  # fmt: skip


class _FunctionTrace(TorchFunctionMode):
    """Traces calls of functions whose result depends on the global tensor."""

    def __init__(self, trace: EagerTrace) -> None:
        super().__init__()
        self._trace = trace
        self._running = [""]  # the paths of the modules that run, innermost last
        self._counts: list[Counter[str]] = [Counter()]

    def enter(self, path: str) -> Callable[..., None]:
        """Returns a hook for the start of a module's forward."""

        def hook(*_: Any) -> None:
            self._running.append(path)
            self._counts.append(Counter())

        return hook

    def leave(self, *_: Any) -> None:
        """Ends the record of a module; a hook after its forward."""
        self._running.pop()
        self._counts.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = _FUNCTIONS.get(inspect.unwrap(func))
        # The tensor of an embedding that may be sharded is its table, the second argument.
        first = args[name == "embedding"] if len(args) > (name == "embedding") else None
        if name is None or not isinstance(first, torch.Tensor) or _is_local(name, args, kwargs):
            return result
        number = self._counts[-1][name]
        self._counts[-1][name] += 1
        if isinstance(first, DTensor):
            output = result[0] if isinstance(result, (tuple, list)) else result
            placements = output.placements if isinstance(output, DTensor) else ()
            call = FunctionCall(
                self._running[-1], name, number, _plain_shards(first.placements),
                _sized_dims(name, args[1:], kwargs or {}), _plain_shards(placements),
            )  # fmt: skip
            self._trace.calls.append(call)
        return result


def _is_local(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a rank computes its part alone: attention that draws no random numbers."""
    if name != "scaled_dot_product_attention":
        return False
    return not (args[4] if len(args) > 4 else (kwargs or {}).get("dropout_p"))


def _plain_shards(placements: Placements) -> Placements:
    """Replaces ragged-shard's interleaved placement by a Shard where it has one part."""
    return tuple(
        Shard(placement.dim) if getattr(placement, "interleaves", 0) == 1 else placement  # type: ignore[attr-defined]
        for placement in placements
    )


def _sized_dims(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the dims whose sizes are arguments of a call; of `split` the dim that it splits."""
    if name == "split":
        return (kwargs.get("dim", args[1] if len(args) > 1 else 0),)
    if name not in ("view", "reshape"):
        return ()
    sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
    return tuple(
        dim for dim, size in enumerate(sizes) if isinstance(size, int) and size not in (-1, 1)
    )
