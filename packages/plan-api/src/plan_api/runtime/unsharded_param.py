"""Unsharded parameters: gathered before their module runs, and freed afterwards.

Note: the *unsharded parameter* is what forward and backward use of a sharded parameter. Its memory
is one storage that is freed and allocated again, as in torch/distributed/fsdp, because autograd has
saved tensors that are views of it. It is filled before its module runs, and again when the gradient
of the module's output arrives; it is freed when the module has run, and when its own gradient is
computed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import OpKind, Schedule, SiteStep
from plan_api.runtime.attribution import moving
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.hooks import register_always_called

__all__ = ["UnshardedParam", "install_unsharded_params"]


class UnshardedParam:
    """The unsharded parameter of one sharded parameter.

    Args:
        owner: a module that has the parameter.
        name: its name there.
        schedule: its placements, and whether the unsharded parameter stays allocated until the
            sharded one has changed; otherwise it is freed after use.
    """

    def __init__(self, owner: nn.Module, name: str, schedule: Schedule) -> None:
        # Not the module: a hook of its own may refer to the model, which this would keep alive.
        self._registry, self._name = owner._parameters, name
        self._placements, self._keeps_unsharded = schedule.run, schedule.keeps_unsharded
        self._step = SiteStep(name, 0, OpKind.SHARD, {}, schedule.entries, schedule.lines)
        self._at = StepContext(f"the gather of parameter {name}", self._step)
        self._local: torch.Tensor | None = None
        self._nbytes = 0
        self._source: weakref.ref[torch.Tensor] | None = None  # local tensor of the sharded one
        self._source_writes: tuple[int, int] | None = None
        self._running_modules = 0
        self._pending_gradients = 0

    @property
    def is_allocated(self) -> bool:
        """Whether its memory is allocated and filled."""
        return self._local is not None and self._local.untyped_storage().nbytes() == self._nbytes

    @property
    def grad_target(self) -> torch.Tensor:
        """The leaf in which autograd accumulates the gradient: the sharded parameter."""
        return self._sharded_param

    def unshard(self) -> torch.Tensor:
        """Returns the parameter for forward; its gradient goes to `grad_target`."""
        sharded = self._sharded_param
        if not (self.is_allocated and self._is_filled_from(sharded)):
            self._fill(sharded)
        self._running_modules += 1
        unsharded: torch.Tensor = _Unshard.apply(self.grad_target, self)  # type: ignore[no-untyped-call]
        return unsharded

    def after_forward(self) -> None:
        """Frees the memory after the last module that uses it has run."""
        self._running_modules -= 1
        self._free_if_unused()

    def before_backward(self) -> None:
        """Fills the memory before the backward of a module that used it."""
        if not self.is_allocated:
            self._fill(self._sharded_param)
        if not self._pending_gradients:
            # A frozen parameter gets no gradient.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self._pending_gradients += 1

    def after_gradient(self) -> None:
        """Frees the memory after the last gradient of it is computed."""
        self._pending_gradients = max(0, self._pending_gradients - 1)
        self._free_if_unused()

    def new_tensor(self) -> torch.Tensor:
        """Returns what modules use: a new DTensor on the memory."""
        assert self._local is not None
        sharded = self._sharded_param
        meta = sharded._spec.tensor_meta
        spec = DTensorSpec(sharded.device_mesh, self._placements, tensor_meta=meta)
        return DTensor(self._local, spec, requires_grad=False)

    @property
    def _sharded_param(self) -> DTensor:
        # Looked up each time: materialising a model on meta makes new parameters.
        sharded: Any = self._registry[self._name]
        assert isinstance(sharded, DTensor)
        return sharded

    def _end_of_backward(self) -> None:
        self._pending_gradients = 0
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        in_use = self._running_modules or self._pending_gradients
        if self._local is None or self._keeps_unsharded or in_use:
            return
        self._local.untyped_storage().resize_(0)

    def _waits_for_(self) -> str:
        """Describes what is waited for, for `fused_comm.diagnosis`."""
        return f"plan-api: parameter {self._name!r} for its use, {self._step.description}"

    def _redistributed(self, sharded: DTensor) -> torch.Tensor:
        try:
            return sharded.redistribute(placements=self._placements)._local_tensor
        except Exception as error:
            self._at.add_to(error, sharded)
            raise

    def _fill(self, sharded: DTensor) -> None:
        with torch.no_grad():
            with moving(self._step, sharded.placements, self._placements):
                gathered = self._redistributed(sharded)
            if self._local is None or not _is_like(self._local, gathered):
                # A copy: along axes of one rank this is the parameter's own memory, or a view.
                self._local = gathered.clone(memory_format=torch.contiguous_format)
                self._nbytes = self._local.untyped_storage().nbytes()
            else:
                self._local.untyped_storage().resize_(self._nbytes)
                same = self._is_filled_from(sharded)
                with _same_version(self._local) if same else contextlib.nullcontext():
                    self._local.copy_(gathered)
        self._source = weakref.ref(sharded._local_tensor)
        self._source_writes = _writes(sharded)

    def _is_filled_from(self, sharded: DTensor) -> bool:
        """Whether the sharded parameter is still what the memory was filled from."""
        source = None if self._source is None else self._source()
        return source is sharded._local_tensor and self._source_writes == _writes(sharded)


class _Unshard(torch.autograd.Function):
    """From a sharded parameter to the unsharded one, and back for its gradient."""

    @staticmethod
    def forward(ctx: Any, grad_target: torch.Tensor, param: UnshardedParam) -> torch.Tensor:
        ctx.param = param
        ctx.set_materialize_grads(False)
        return param.new_tensor()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        ctx.param.after_gradient()
        return grads[0], None


def install_unsharded_params(
    module: nn.Module, params: Mapping[str, UnshardedParam]
) -> list[RemovableHandle]:
    """Makes a module use unsharded parameters, by name, whenever it runs.

    They are unsharded before all earlier hooks of the module, which may redistribute them.
    """

    def before(module: nn.Module, _: Any) -> None:
        for name, param in params.items():
            # Attribute lookup finds this first; optimizers and checkpoints see the sharded one.
            module.__dict__[name] = param.unshard()

    def after(module: nn.Module, _: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            map_tensors(output, _before_backward_of(params))
        for name, param in params.items():
            if module.__dict__.pop(name, None) is not None:
                param.after_forward()

    return [
        module.register_forward_pre_hook(before, prepend=True),
        register_always_called(module, after),
    ]


def _before_backward_of(
    params: Mapping[str, UnshardedParam],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Calls `before_backward` once per backward, when the first output's gradient arrives."""
    last_backward = -1

    def gradient_hook(_: torch.Tensor) -> None:
        nonlocal last_backward
        backward = torch._C._current_graph_task_id()
        if last_backward != backward:
            last_backward = backward
            for param in params.values():
                param.before_backward()

    def register(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(gradient_hook)
        return tensor

    return register


def _same_version(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Keeps saved tensors valid while the same values are written again."""
    guard: contextlib.AbstractContextManager[None]
    guard = torch.autograd._unsafe_preserve_version_counter(tensor)
    return guard


def _is_like(memory: torch.Tensor, gathered: torch.Tensor) -> bool:
    """Whether memory is of a gathered parameter, which `model.to` may have changed since."""
    return (memory.device, memory.dtype, memory.shape) == (
        gathered.device, gathered.dtype, gathered.shape,
    )  # fmt: skip


def _writes(sharded: DTensor) -> tuple[int, int]:
    """Changes with every write, through the DTensor or to its local tensor."""
    return sharded._version, sharded._local_tensor._version
