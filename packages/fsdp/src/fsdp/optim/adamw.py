"""AdamW that steps on the buffers of groups: one tensor for each run of parameters in memory.

Note: a run. Parameters of one parameter group (of the optimizer) that follow each other in memory
are updated as one tensor where their gradients and moments follow each other too, and where they
have done the same number of steps. Moments are allocated that way; gradients are, where
`fully_shard` reduces them. Anything else is a run of one tensor: plain parameters, and the local
tensors of other DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from dbuffer import dtensor_of
from fsdp.collectives.contiguous import contiguous_runs, flat_view
from fsdp.optim.state_dict import check_state_sharding
from fsdp.optim.tensors import local_of, parameter_name

__all__ = ["AdamW"]

#: The kernel computes what is left over after the last full vector by other instructions, which
#: round differently. A parameter whose size is no multiple of a vector is the last of its run, so
#: that each element is computed as in a kernel for its parameter alone.
_VECTOR_BYTES = 64


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)`` that updates the parameters of a group as one tensor.

    It has the bits of torch's on the same parameters, and its state dict: each loads the other's,
    whatever implementation (``fused``, ``foreach``) that was. ``step()`` sends nothing. Parameters
    may be sharded by `fully_shard`, DTensors of other placements or plain tensors, also in one
    parameter group.

    The moments of parameters that follow each other in a buffer are views of one tensor. A
    parameter that gets its first gradient in a later step than its neighbours, or whose size is no
    multiple of 64 bytes, ends a run.

    Args:
        params: as for any torch optimizer. With ``model.named_parameters()`` errors have the names.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: is added to the root of the second moment.
        weight_decay: decoupled weight decay.
        amsgrad: whether the largest second moment so far is used.
        maximize: whether the objective is maximized.
        fused: True; torch.optim.AdamW has the other implementations.

    Raises:
        ValueError: an option is out of range, or asks for another implementation.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool = True,
    ) -> None:
        self._counts: dict[torch.Tensor, _StepCount] = {}
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=fused
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as torch's optimizers do, after checking it.

        Raises:
            ValueError: it asks for another implementation than the fused one; it is not added.
        """
        options = {**self.defaults, **param_group}
        others = [key for key in ("foreach", "capturable", "differentiable") if options[key]]
        if others or not options["fused"]:
            found = f"{others[0]}=True" if others else f"fused={options['fused']}"
            raise ValueError(
                f"AdamW: expected fused=True, got {found}; leave it out, or use torch.optim.AdamW"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have gradients.

        Args:
            closure: recomputes the loss and its gradients.

        Raises:
            ValueError: a gradient is sparse; or only one of gradient and parameter is a DTensor, or
                their meshes differ.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            updates = self._updates(group, index)
            if updates:
                self._run(updates, group)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the optimizer; `load_state_dict` and unpickling end with this call.

        Raises:
            ValueError: a moment is not sharded as its parameter; it names the parameter.
        """
        names = {
            param: parameter_name(group, index, i)
            for index, group in enumerate(state["param_groups"])
            for i, param in enumerate(group["params"])
        }
        loaded = {param: own for param in names if (own := state["state"].get(param))}
        check_state_sharding(loaded, names, "AdamW")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._counts = {}
        for param, own in loaded.items():
            own["step"] = own["step"].to(local_of(param).device, torch.float32)
        for group in self.param_groups:
            group.update(fused=True, foreach=None, capturable=False, differentiable=False)
            self._place_moments([param for param in group["params"] if param in loaded], group)

    def _updates(self, group: dict[str, Any], index: int) -> list[_Update]:
        """Returns the updates of the parameters that have gradients; creates missing state."""
        numbers = [i for i, param in enumerate(group["params"]) if param.grad is not None]
        params = [group["params"][i] for i in numbers]
        new = [param for param in params if not self.state[param]]
        for param in new:
            step = torch.zeros((), dtype=torch.float32, device=local_of(param).device)
            self.state[param]["step"] = step
            self._counts[param] = _StepCount(step, step._version, 0.0)
        self._place_moments(new, group)
        moments, updates = _moments(group), []
        for i, param in zip(numbers, params, strict=True):
            own = self.state[param]
            tensors = [local_of(param), _local_grad(param, group, index, i)]
            tensors += [local_of(own[key]) for key in moments]
            updates.append(_Update(param, tensors, own["step"], self._label(param, own["step"])))
        return updates

    def _label(self, param: torch.Tensor, step: torch.Tensor) -> object:
        """Returns what is equal for parameters that have done the same number of steps.

        The number is read only if something else than `step` has written it, as an accelerator
        would have to be waited for.
        """
        count = self._counts.get(param)
        if count is None or count.step is not step or count.version != step._version:
            return float(step)
        return count.label

    def _run(self, updates: Sequence[_Update], group: dict[str, Any]) -> None:
        """Updates all runs of some parameters by one call of torch's kernel."""
        columns = [list(column) for column in zip(*(one.tensors for one in updates), strict=True)]
        labels = [one.label for one in updates]
        runs = contiguous_runs(columns, labels, nbytes=_VECTOR_BYTES)
        params, grads, exp_avgs, exp_avg_sqs, *largest = (
            [flat_view([column[i] for i in run]) for run in runs] for column in columns
        )
        found_inf = getattr(self, "found_inf", None)
        scale = getattr(self, "grad_scale", None)
        beta1, beta2 = group["betas"]
        adam(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            largest[0] if largest else [],
            [updates[run[0]].step for run in runs],
            fused=True,
            grad_scale=None if scale is None else local_of(scale),
            found_inf=None if found_inf is None else local_of(found_inf),
            decoupled_weight_decay=True,
            beta1=beta1,
            beta2=beta2,
            **{key: group[key] for key in ("amsgrad", "lr", "weight_decay", "eps", "maximize")},
        )
        pairs = [(updates[i].step, updates[run[0]].step) for run in runs for i in run[1:]]
        if pairs:
            torch._foreach_copy_([step for step, _ in pairs], [first for _, first in pairs])
        increment_version([*(one.param for one in updates), *columns[0]])
        after: dict[object, object] = {}
        for one in updates:
            label = after.setdefault(one.label, object())
            self._counts[one.param] = _StepCount(one.step, one.step._version, label)

    def _place_moments(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """Moves the moments of each run to one tensor; those that are missing are zero."""
        local = [local_of(param) for param in params]
        for run in contiguous_runs([local], nbytes=_VECTOR_BYTES):
            states = [self.state[params[i]] for i in run]
            for key in _moments(group):
                before = [local_of(state[key]) for state in states if key in state]
                if len(before) == len(run) and len(contiguous_runs([before])) == 1:
                    continue
                memory = _zeros_like([local[i] for i in run])
                for i, state, part in zip(run, states, memory, strict=True):
                    if key in state:
                        part.copy_(local_of(state[key]))
                    state[key] = _placed_like(params[i], part)


@dataclass(frozen=True, eq=False)
class _StepCount:
    """What is known of the number of steps that a parameter has done, without reading it.

    Attributes:
        step: the tensor that counts.
        version: of the tensor after the last step.
        label: equal for parameters with equal numbers.
    """

    step: torch.Tensor
    version: int
    label: object


@dataclass(frozen=True, eq=False)
class _Update:
    """The update of one parameter.

    Attributes:
        param: the parameter.
        tensors: local ones of the parameter, its gradient and its moments.
        step: counts its steps.
        label: as of `_StepCount`.
    """

    param: torch.Tensor
    tensors: list[torch.Tensor]
    step: torch.Tensor
    label: object


def _moments(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def _local_grad(
    param: torch.Tensor, group: dict[str, Any], group_index: int, param_index: int
) -> torch.Tensor:
    """Returns the local gradient of a parameter, placed as the parameter."""
    grad = param.grad
    assert grad is not None
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        if grad.device_mesh == param.device_mesh:
            if grad.placements != param.placements:
                grad = grad.redistribute(placements=param.placements)
            return grad._local_tensor
    elif (
        not isinstance(param, DTensor)
        and not isinstance(grad, DTensor)
        and grad.layout is torch.strided
    ):
        return grad
    name = parameter_name(group, group_index, param_index)
    raise ValueError(
        f"AdamW: expected parameter {name!r} and its gradient to be DTensors of one mesh, or both "
        f"dense plain tensors, got a {type(param).__name__} and a {grad.layout} "
        f"{type(grad).__name__}"
    )


def _zeros_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns zeros of the shapes of tensors of a run, in one tensor."""
    first = tensors[0]
    if len(tensors) == 1:
        return [torch.zeros_like(first, memory_format=torch.preserve_format)]
    sizes = [tensor.numel() for tensor in tensors]
    parts: Iterable[torch.Tensor] = first.new_zeros(sum(sizes)).split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _placed_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return local
    return dtensor_of(local, param._spec)
