"""Compares static mode with Eager on the same inputs: outputs, gradients and collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.hooks import RemovableHandle

from plan_api._compat import is_uneven_view_error
from plan_api.inspect.collective_recorder import (
    CollectiveDifference,
    SentCollective,
    compare_collectives,
    recorded_collectives,
)
from plan_api.runtime.containers import map_tensors
from plan_api.static.shadow_model import is_fake

__all__ = [
    "Difference",
    "StaticError",
    "compare_modes",
    "loss_gradients",
    "preserved_state",
]

_ModuleCall: TypeAlias = tuple[str, int]  # the path of a module, and the number of its call


@dataclass(frozen=True)
class Difference:
    """Where static mode first differs from Eager.

    Attributes:
        site: the path of the module or parameter; "" for the model.
        what: which of its tensors, as in "the gradient of".
        reason: how they differ.
        only_rounding: whether the values are equal up to the rounding of their dtype.
        only_collectives: whether the values are equal, and static mode sends other collectives.
    """

    site: str
    what: str
    reason: str
    only_rounding: bool
    only_collectives: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether static mode computes something else than Eager."""
        return not (self.only_rounding or self.only_collectives)

    def __str__(self) -> str:
        return f"{self.what} {self.site or 'the model'}: {self.reason}"


class StaticError(ValueError):
    """Static mode computes something else than Eager, or does not support the plan.

    Attributes:
        site: the module or parameter where that is seen first.
    """

    def __init__(self, message: str, site: str) -> None:
        super().__init__(message)
        self.site = site


@dataclass
class _RunTrace:
    """Local tensors of one run, by module and call, and its collectives.

    Attributes:
        outputs: the outputs of each call.
        gradients: the gradients of these outputs, in the order of backward.
        collectives: in their order.
    """

    outputs: dict[_ModuleCall, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[_ModuleCall, list[torch.Tensor]] = field(default_factory=dict)
    collectives: list[SentCollective] = field(default_factory=list)


@dataclass(frozen=True)
class _Run:
    """One run, forward and backward.

    Attributes:
        result: of the model.
        gradients: of the parameters; None for one that the loss does not depend on.
        trace: of what happened on the way.
    """

    result: Any
    gradients: tuple[torch.Tensor | None, ...]
    trace: _RunTrace


def compare_modes(
    eager: nn.Module,
    static: nn.Module,
    local_params: Mapping[str, tuple[torch.Tensor, Callable[[torch.Tensor], DTensor]]],
    mesh: DeviceMesh,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_replicated: Callable[[str], bool] = lambda _: False,
    *,
    has_local_regions: bool = False,
    ignored_axis: str | None = None,
) -> list[Difference]:
    """Runs both models forward and backward, from one state of the random number generators.

    Backward starts at the first scalar output, as the loss, or at all outputs if none is a scalar.
    Random number generators, buffers and ``.grad`` are left unchanged. FakeTensors are compared by
    shape and dtype. Collectives are compared by kind, number and bytes along each axis. Compiled
    modules run without their compiled code, in which nothing could be recorded.

    Args:
        eager: a shadow model, parallelized in Eager.
        static: the model, in static mode.
        local_params: by parameter name, the local parameter in static mode, and the function that
            turns its gradient into a DTensor.
        mesh: of the plan.
        args: the model's positional arguments.
        kwargs: the model's keyword arguments.
        is_replicated: whether Eager has replicated what static mode shards in the module of a path,
            whose outputs are not compared then.
        has_local_regions: whether modules run on local tensors in Eager, too. Of the gradient of a
            tensor that such a module and others use, Eager has the others' part.
        ignored_axis: the axis along which collectives are not compared; None: there is none.

    Returns:
        the differences on this rank, in the order in which they arose, those of collectives last;
        empty if all bits and collectives are equal.
    """
    params = {name: param for name, param in eager.named_parameters() if param.requires_grad}
    # Static mode first: it rejects more, and then nothing has been sent yet.
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, preserved_state(static), torch.enable_grad():
        of_static = [local_params[name][0] for name in params]
        actual = _run(static, of_static, args, kwargs, mesh)
    # Tensors that the model creates itself are replicated, and may meet sharded DTensors, as a mask
    # does that it indexes.
    with preserved_state(eager), torch.enable_grad(), implicit_replication():
        expected = _run(eager, list(params.values()), args, kwargs, mesh)
    differences = [
        *_compare_calls(
            expected.trace.outputs, actual.trace.outputs, is_replicated, "what is returned by",
            "static mode did not call it",
        ),
        *_compare_results(expected.result, actual.result),
    ]  # fmt: skip
    reduced = [
        _reduced(name, param, expected_grad, actual_grad, *local_params[name])
        for (name, param), expected_grad, actual_grad in zip(
            params.items(), expected.gradients, actual.gradients, strict=True
        )
    ]
    of_params = list(_compare_param_gradients(reduced))
    # These say where a difference began. Where all gradients of parameters have Eager's bits they
    # say nothing: rows on which none depends may be uninitialized, as grouped products leave those
    # of other ranks' experts.
    if not differences and of_params:
        of_calls = _compare_calls(
            expected.trace.gradients, actual.trace.gradients, is_replicated,
            "the gradient of what is returned by", "static mode computed none",
        )  # fmt: skip
        # Where those differ by rounding only, so does what matters of partial gradients.
        is_wrong = not has_local_regions or any(one.is_wrong for one in of_params)
        differences += [one for one in of_calls if is_wrong or one.only_rounding]
    sent = compare_collectives(expected.trace.collectives, actual.trace.collectives)
    of_collectives = [_of_collectives(one) for one in sent if one.axis != ignored_axis]
    return [*differences, *of_params, *of_collectives]


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Restores the random number generators and the model's buffers at the end of the block."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with forked_generators(model), torch.no_grad():
        yield
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer.copy_(value)


@contextmanager
def forked_generators(model: nn.Module) -> Iterator[None]:
    """Restores the CPU's random number generator and those of the model's devices at the end."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        for device in devices:
            if device.type not in ("cpu", "meta"):
                fork = torch.random.fork_rng([device.index], device_type=device.type)
                stack.enter_context(fork)
        yield


def loss_gradients(result: Any, params: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Computes gradients of a model's loss: its first scalar output, or else all its outputs."""
    outputs = [tensor for tensor in _tensors(result) if tensor.requires_grad]
    loss = next((output for output in outputs if output.ndim == 0), None)
    if not outputs:
        return (None,) * len(params)
    roots = outputs if loss is None else [loss]
    return torch.autograd.grad(
        roots, params, [torch.ones_like(root) for root in roots], allow_unused=True
    )


def _run(
    model: nn.Module,
    params: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: DeviceMesh,
) -> _Run:
    """Runs a model forward and backward; records its collectives."""
    trace = _RunTrace()
    with recorded_collectives(model, mesh) as trace.collectives:
        result = _run_forward(model, args, kwargs, trace)
        return _Run(result, loss_gradients(result, [*params]), trace)


def _run_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], trace: _RunTrace
) -> Any:
    handles, running = [], [""]
    for name, module in model.named_modules():
        handles.append(_record_outputs(name, module, trace))
        handles.append(module.register_forward_pre_hook(_push_path(name, running), prepend=True))
        handles.append(module.register_forward_hook(_pop_path(running)))  # not if forward raises
    try:
        return model(*args, **kwargs)
    except Exception as error:
        remedy = "where it fails in static mode only, its code may name global sizes, where its "
        remedy += "tensors have local ones"
        if is_uneven_view_error(str(error)):  # of DTensor
            remedy = "static mode runs this, and Eager, with which it is compared, does not: let "
            remedy += "the first step be one of even shards, or pass guard_steps=0"
        raise StaticError(
            f"the model fails in {running[-1] or 'its own code'}, or in what follows it: {error}; "
            f"{remedy}",
            running[-1],
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _push_path(name: str, running: list[str]) -> Callable[..., None]:
    return lambda *_: running.append(name)


def _pop_path(running: list[str]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        running.pop()

    return hook


def _record_outputs(name: str, module: nn.Module, trace: _RunTrace) -> RemovableHandle:
    calls = 0

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal calls
        call, calls = (name, calls), calls + 1
        trace.outputs[call] = []

        def record(tensor: torch.Tensor) -> torch.Tensor:
            trace.outputs[call].append(_local(tensor).detach().clone())
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(
                    lambda grad: trace.gradients.setdefault(call, []).append(_local(grad).clone())
                )
            return tensor

        map_tensors(output, record)

    return module.register_forward_hook(hook)


def _tensors(result: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(result, collect)
    return found


def _compare_calls(
    eager: Mapping[_ModuleCall, list[torch.Tensor]],
    static: Mapping[_ModuleCall, list[torch.Tensor]],
    is_replicated: Callable[[str], bool],
    what: str,
    if_missing: str,
) -> Iterator[Difference]:
    for (name, call), expected in eager.items():
        if not name or is_replicated(name):
            continue  # the model itself: see _compare_results
        actual = static.get((name, call))
        if actual is None:
            yield Difference(name, what, if_missing, False)
        elif len(actual) != len(expected):
            reason = f"expected {len(expected)} tensors as in Eager, got {len(actual)}"
            yield Difference(name, what, reason, False)
        else:
            for one, other in zip(expected, actual, strict=True):
                yield from _compare_tensors(name, what, one, other)


def _compare_results(eager: Any, static: Any) -> Iterator[Difference]:
    what = "what is returned by"
    for expected, actual in zip(_tensors(eager), _tensors(static), strict=True):
        placements = expected.placements if isinstance(expected, DTensor) else ()
        if not isinstance(actual, DTensor):
            # No entry can say _StridedShard, the rows of sequences that are sharded as batches are.
            if any(isinstance(placement, _StridedShard) for placement in placements) or all(
                placement.is_replicate() for placement in placements
            ):
                yield from _compare_tensors("", what, _local(expected), actual)
                continue
            yield Difference(
                "", what,
                f"a tensor of {tuple(expected.shape)} is {placements} in Eager, and a plain local "
                f"tensor in static mode: add annotate('<out:...>', ...), or replicate it with "
                f"redistribute()", False,
            )  # fmt: skip
        elif actual.placements != placements:
            reason = f"expected {placements} as in Eager, got {actual.placements}"
            yield Difference("", what, reason, False)
        else:
            yield from _compare_tensors("", what, _local(expected), _local(actual))


@dataclass(frozen=True)
class _ReducedGradient:
    """A parameter's full gradient in both modes, and its placements before the reduction."""

    name: str
    expected: torch.Tensor
    actual: torch.Tensor
    placements: str


def _reduced(
    name: str,
    param: torch.Tensor,
    expected: torch.Tensor | None,
    actual: torch.Tensor | None,
    local_param: torch.Tensor,
    as_dtensor: Callable[[torch.Tensor], DTensor],
) -> _ReducedGradient:
    """Reduces both gradients, however they are placed: equal terms give bit-equal sums."""
    eager: Any = torch.zeros_like(param) if expected is None else expected
    static = as_dtensor(torch.zeros_like(local_param) if actual is None else actual)
    placements = f"Eager's is {eager.placements}, the plan's {static.placements}"
    return _ReducedGradient(name, eager.full_tensor(), static.full_tensor(), placements)


def _compare_param_gradients(gradients: list[_ReducedGradient]) -> Iterator[Difference]:
    # A gradient that is zero up to rounding is compared at the scale of the largest one.
    largest = 0.0
    for one in gradients:
        if one.expected.numel() and not is_fake(one.expected):
            largest = max(largest, one.expected.nan_to_num().abs().max().item())
    for one in gradients:
        for found in _compare_tensors(
            one.name, "the gradient of", one.expected, one.actual, largest
        ):
            yield replace(found, reason=f"{found.reason}; {one.placements}")


def _compare_tensors(
    site: str, what: str, expected: torch.Tensor, actual: torch.Tensor, largest: float = 0.0
) -> Iterator[Difference]:
    if expected.shape != actual.shape:
        reason = (
            f"expected {tuple(expected.shape)} on this rank as in Eager, got {tuple(actual.shape)}"
        )
        yield Difference(site, what, reason, False)
    elif expected.dtype != actual.dtype:
        reason = f"expected {expected.dtype} as in Eager, got {actual.dtype}"
        yield Difference(site, what, reason, False)
    elif is_fake(expected):
        return
    elif not torch.equal(expected, actual) and not (expected.isnan() == actual.isnan()).all():
        yield Difference(site, what, "nan in one of the modes only", False)
    elif not torch.equal(expected.nan_to_num(), actual.nan_to_num()):
        if not expected.is_floating_point():
            yield Difference(site, what, "another value than in Eager", False)
            return
        wide = expected.nan_to_num().double()
        error = (wide - actual.nan_to_num().double()).abs().max().item()
        size = wide.abs().max().item()
        yield Difference(
            site, what, f"{error:.2g} from Eager's, of {size:.2g}",
            error <= torch.finfo(expected.dtype).eps * max(1000 * size, largest),
        )  # fmt: skip


def _of_collectives(found: CollectiveDifference) -> Difference:
    """Describes which collectives differ, by the first that only one of the modes sends."""
    along = f"along {found.axis!r}" if found.axis else "in a group that is no axis"
    of = "the backward of " if found.first.in_backward else ""
    reason = (
        f"a step sends {len(found.actual)} {found.name} of {sum(found.actual)} bytes {along}, in "
        f"Eager {len(found.expected)} of {sum(found.expected)} bytes"
    )
    what = f"the communication in {of}"
    site = found.first.site or ""
    return Difference(site, what.rstrip(), reason, False, only_collectives=True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
