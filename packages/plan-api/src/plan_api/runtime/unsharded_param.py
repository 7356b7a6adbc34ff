"""Parameters that are used otherwise than they rest: gathered for their module, and let go.

Note: a parameter's *copy* is what forward and backward use; its memory is one storage that is
emptied and filled again, as in torch/distributed/fsdp, for autograd has saved tensors that lie in
it. It is filled before its module runs, and again when the gradient of what that returned arrives;
it is emptied when the module has run, and when its own gradient is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.fuse import Step
from plan_api.lowering.ir import Act
from plan_api.lowering.schedule import Schedule
from plan_api.runtime.attribution import moving
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext

__all__ = ["Copy", "install_copies"]


class Copy:
    """What is used of one parameter.

    Args:
        owner: a module that has the parameter.
        name: its name there.
        schedule: how it is placed while it is used, and whether it stays until the parameter has
            changed; otherwise it is let go after use.
    """

    def __init__(self, owner: nn.Module, name: str, schedule: Schedule) -> None:
        self._owner, self._name = owner, name
        self._placements, self._keeps = schedule.run, schedule.keeps
        self._step = Step(name, 0, Act.SHARD, {}, schedule.entries, schedule.lines)
        self._at = StepContext(f"the gather of parameter {name}", self._step)
        self._local: torch.Tensor | None = None
        self._nbytes = 0
        self._of: tuple[int, int] | None = None  # the versions of what it is a copy of
        self._running = 0  # modules that are using it
        self._awaited = 0  # uses whose gradient is being made

    @property
    def resident(self) -> bool:
        """Whether its memory is filled."""
        return self._local is not None and self._local.untyped_storage().nbytes() == self._nbytes

    def use(self) -> torch.Tensor:
        """The parameter as forward uses it; its gradient goes to the parameter."""
        rest = self._rest
        if not (self.resident and self._of == _versions(rest)):
            self._fill(rest)
        self._running += 1
        used: torch.Tensor = _Use.apply(rest, self)  # type: ignore[no-untyped-call]
        return used

    def used(self) -> None:
        """When the module has run."""
        self._running -= 1
        self._let_go()

    def await_gradient(self) -> None:
        """Before backward of a module that has used it."""
        if not self.resident:
            self._fill(self._rest)
        if not self._awaited:
            # Of a frozen parameter no gradient comes.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self._awaited += 1

    def gradient_made(self) -> None:
        """When backward of a use is through."""
        self._awaited = max(0, self._awaited - 1)
        self._let_go()

    def as_used(self) -> DTensor:
        """A new DTensor on the memory."""
        assert self._local is not None
        rest = self._rest
        meta = rest._spec.tensor_meta
        spec = DTensorSpec(rest.device_mesh, self._placements, tensor_meta=meta)
        return DTensor(self._local, spec, requires_grad=False)

    @property
    def _rest(self) -> DTensor:
        # Looked up each time: materialising a model on meta makes new parameters.
        rest: Any = self._owner._parameters[self._name]
        assert isinstance(rest, DTensor)
        return rest

    def _end_of_backward(self) -> None:
        self._awaited = 0
        self._let_go()

    def _let_go(self) -> None:
        if self._local is None or self._keeps or self._running or self._awaited:
            return
        self._local.untyped_storage().resize_(0)

    def _waits_for_(self) -> str:
        """For `fused_comm.diagnosis`."""
        return f"plan-api: parameter {self._name!r} for its use, {self._step.said}"

    def _redistributed(self, rest: DTensor) -> torch.Tensor:
        try:
            return rest.redistribute(placements=self._placements)._local_tensor
        except Exception as error:
            self._at.add_to(error, rest)
            raise

    def _fill(self, rest: DTensor) -> None:
        with torch.no_grad():
            with moving(self._step, rest.placements, self._placements):
                fresh = self._redistributed(rest)
            if self._local is None or self._local.device != fresh.device:
                # Not the parameter's own memory, as along axes of one rank, nor a part of more.
                self._local = fresh.clone(memory_format=torch.contiguous_format)
                self._nbytes = self._local.untyped_storage().nbytes()
            else:
                self._local.untyped_storage().resize_(self._nbytes)
                same = self._of == _versions(rest)
                with _unnoticed(self._local) if same else contextlib.nullcontext():
                    self._local.copy_(fresh)
        self._of = _versions(rest)


class _Use(torch.autograd.Function):
    """From a parameter to its copy, and back with the gradient as backward has placed it."""

    @staticmethod
    def forward(ctx: Any, rest: DTensor, copy: Copy) -> torch.Tensor:
        ctx.copy = copy
        ctx.set_materialize_grads(False)
        return copy.as_used()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        ctx.copy.gradient_made()
        return grads[0], None


def install_copies(module: nn.Module, copies: Mapping[str, Copy]) -> list[RemovableHandle]:
    """Makes a module use copies of its own parameters, by name, whenever it runs."""

    def before(module: nn.Module, _: Any) -> None:
        for name, copy in copies.items():
            # Found before the parameter is, which stays where optimizers and checkpoints look.
            module.__dict__[name] = copy.use()

    def after(module: nn.Module, _: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            map_tensors(output, _announcer(copies))
        for name, copy in copies.items():
            if module.__dict__.pop(name, None) is not None:
                copy.used()

    return [
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    ]


def _announcer(copies: Mapping[str, Copy]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Tells the copies of one call, once a backward, that gradients are about to be made."""
    told = -1  # in which backward

    def tell(_: torch.Tensor) -> None:
        nonlocal told
        backward = torch._C._current_graph_task_id()
        if told != backward:
            told = backward
            for copy in copies.values():
                copy.await_gradient()

    def announce(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(tell)
        return tensor

    return announce


def _unnoticed(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """What autograd has saved of a tensor stays valid: it is filled with the same again."""
    kept: contextlib.AbstractContextManager[None]
    kept = torch.autograd._unsafe_preserve_version_counter(tensor)
    return kept


def _versions(rest: DTensor) -> tuple[int, int]:
    """Change with every write, through the DTensor or to its local tensor."""
    return rest._version, rest._local_tensor._version
