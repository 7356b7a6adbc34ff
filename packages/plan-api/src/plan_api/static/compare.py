"""Static mode held against Eager, on the same inputs: what modules return, and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.hooks import RemovableHandle

from plan_api.runtime.containers import map_tensors
from plan_api.static.fake import is_fake

__all__ = [
    "Difference",
    "StaticError",
    "compare",
    "gradients",
    "kept",
]


@dataclass(frozen=True)
class Difference:
    """Where static mode first did something else than Eager.

    Attributes:
        site: the module, or the parameter.
        what: of it.
        reason: in words.
        bits: whether only bits differ, within the rounding of its dtype.
    """

    site: str
    what: str
    reason: str
    bits: bool

    def __str__(self) -> str:
        return f"{self.what} {self.site or 'the model'}: {self.reason}"


class StaticError(ValueError):
    """Static mode does not do what Eager does, or cannot.

    Attributes:
        site: the module or parameter where that shows first.
    """

    def __init__(self, message: str, site: str) -> None:
        super().__init__(message)
        self.site = site


@dataclass
class _Trace:
    """What one run has shown: local tensors, in the order in which they came."""

    returned: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)


def compare(
    eager: nn.Module,
    static: nn.Module,
    of_param: Mapping[str, tuple[torch.Tensor, Callable[[torch.Tensor], DTensor]]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> list[Difference]:
    """Runs both forward and backward, from one state of the random number generators.

    Gradients are those of the first number that the model returns, as a loss, or of all that it
    returns. Neither the generators nor buffers nor ``.grad`` are changed. Of FakeTensors shapes
    and dtypes are compared.

    Args:
        eager: a twin of the model, parallelized in Eager.
        static: the model.
        of_param: by name, what is used of each parameter in static mode, and what makes its
            gradient a DTensor.
        args: of the model.
        kwargs: of the model.

    Returns:
        differences on this rank, in the order in which they arose; none if all bits are the same.
    """
    used = {name: param for name, param in eager.named_parameters() if param.requires_grad}
    # First what refuses more, so that it does so before anything is sent.
    with kept(static), torch.enable_grad():
        found, own = _run(static, args, kwargs)
        own_grads = gradients(found, [of_param[name][0] for name in used])
    # What a model makes itself is whole, and may meet what is not, such as a mask that it indexes.
    with kept(static), torch.enable_grad(), implicit_replication():
        wanted, traced = _run(eager, args, kwargs)
        grads = gradients(wanted, list(used.values()))
    differences = [
        *_of_modules(
            traced.returned, own.returned, "what is returned by", "static mode did not call it"
        ),
        *_of_results(wanted, found),
    ]
    if not differences:
        differences += _of_modules(
            traced.gradients,
            own.gradients,
            "the gradient of what is returned by",
            "none came in static mode",
        )
    largest = 0.0  # a gradient that is zero but for rounding is held against the others
    reduced = []
    for (name, param), grad, local in zip(used.items(), grads, own_grads, strict=True):
        wanted_grad: Any = torch.zeros_like(param) if grad is None else grad
        leaf, placed = of_param[name]
        own_grad = placed(torch.zeros_like(leaf) if local is None else local)
        # Reduced, whatever each has left to be summed: the same terms have a sum of the same bits.
        whole, other = wanted_grad.full_tensor(), own_grad.full_tensor()
        if whole.numel() and not is_fake(whole):
            largest = max(largest, whole.nan_to_num().abs().max().item())
        placed_so = f"Eager's is {wanted_grad.placements}, the plan's {own_grad.placements}"
        reduced.append((name, whole, other, placed_so))
    for name, whole, other, placed_so in reduced:
        for one in _unequal(name, "the gradient of", whole, other, largest):
            differences.append(replace(one, reason=f"{one.reason}; {placed_so}"))
    return differences


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Within it nothing is changed for good: neither generators nor buffers."""
    before = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus), torch.no_grad():
        yield
        for module, name, buffer, value in before:
            module._buffers[name] = buffer.copy_(value)


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, _Trace]:
    trace, handles, running = _Trace(), [], [""]
    for name, module in model.named_modules():
        handles.append(_watch(name, module, trace))
        handles.append(module.register_forward_pre_hook(_entering(name, running), prepend=True))
        handles.append(module.register_forward_hook(_through(running)))  # not if it fails
    try:
        return model(*args, **kwargs), trace
    except Exception as error:
        raise StaticError(
            f"the model fails in {running[-1] or 'its own code'}, or in what comes after it: "
            f"{error}; where only static mode fails, its code may say sizes of the whole",
            running[-1],
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _entering(name: str, running: list[str]) -> Callable[..., None]:
    return lambda *_: running.append(name)


def _through(running: list[str]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        running.pop()

    return hook


def _watch(name: str, module: nn.Module, trace: _Trace) -> RemovableHandle:
    calls = 0

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal calls
        at, calls = (name, calls), calls + 1
        trace.returned[at] = []

        def look(tensor: torch.Tensor) -> torch.Tensor:
            trace.returned[at].append(_local(tensor).detach().clone())
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(
                    lambda grad: trace.gradients.setdefault(at, []).append(_local(grad).clone())
                )
            return tensor

        map_tensors(output, look)

    return module.register_forward_hook(hook)


def gradients(result: Any, params: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Of a model's loss, or of all that it returns: the first number is the loss."""
    leaves = [one for one in _tensors(result) if one.requires_grad]
    loss = next((one for one in leaves if one.ndim == 0), None)
    if not leaves:
        return (None,) * len(params)
    outputs = leaves if loss is None else [loss]
    return torch.autograd.grad(
        outputs, params, [torch.ones_like(one) for one in outputs], allow_unused=True
    )


def _tensors(result: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(result, look)
    return found


def _of_modules(
    eager: Mapping[tuple[str, int], list[torch.Tensor]],
    static: Mapping[tuple[str, int], list[torch.Tensor]],
    what: str,
    nothing: str,
) -> Iterator[Difference]:
    for (name, call), wanted in eager.items():
        if not name:
            continue  # see _of_results
        found = static.get((name, call))
        if found is None:
            yield Difference(name, what, nothing, False)
        elif len(found) != len(wanted):
            yield Difference(name, what, f"{len(wanted)} tensors in Eager, {len(found)}", False)
        else:
            for one, other in zip(wanted, found, strict=True):
                yield from _unequal(name, what, one, other)


def _of_results(eager: Any, static: Any) -> Iterator[Difference]:
    what = "what is returned by"
    for wanted, found in zip(_tensors(eager), _tensors(static), strict=True):
        placements = wanted.placements if isinstance(wanted, DTensor) else ()
        whole = all(one.is_replicate() for one in placements)
        shown = isinstance(found, DTensor)
        if not whole and not shown:
            yield Difference(
                "", what,
                f"a tensor of {tuple(wanted.shape)} is {placements} in Eager, and a plain part of "
                f"it in static mode: say annotate('<out:...>', ...), or make it whole by "
                f"redistribute()", False,
            )  # fmt: skip
        elif shown and found.placements != placements:  # type: ignore[attr-defined]
            reason = f"{placements} in Eager, {found.placements}"  # type: ignore[attr-defined]
            yield Difference("", what, reason, False)
        else:
            yield from _unequal("", what, _local(wanted), _local(found))


def _unequal(
    site: str, what: str, one: torch.Tensor, other: torch.Tensor, largest: float = 0.0
) -> Iterator[Difference]:
    if one.shape != other.shape:
        reason = f"{tuple(one.shape)} on this rank in Eager, {tuple(other.shape)}"
        yield Difference(site, what, reason, False)
    elif one.dtype != other.dtype:
        yield Difference(site, what, f"{one.dtype} in Eager, {other.dtype}", False)
    elif is_fake(one):
        return
    elif not torch.equal(one, other) and not (one.isnan() == other.isnan()).all():
        yield Difference(site, what, "nan in one of the modes only", False)
    elif not torch.equal(one.nan_to_num(), other.nan_to_num()):
        if not one.is_floating_point():
            yield Difference(site, what, "another value than in Eager", False)
            return
        wide = one.nan_to_num().double()
        error = (wide - other.nan_to_num().double()).abs().max().item()
        size = wide.abs().max().item()
        yield Difference(
            site, what, f"{error:.2g} from Eager's, of {size:.2g}",
            error <= torch.finfo(one.dtype).eps * max(1000 * size, largest),
        )  # fmt: skip


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
