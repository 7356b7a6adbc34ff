"""Adam with block-wise 8-bit moments, every block of which is on one rank."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from fsdp.optim.adam8bit.state import new_state
from fsdp.optim.adam8bit.step import CachedLayout, ParamUpdate, prepare_update, run_updates
from fsdp.optim.adam8bit.update import AdamCoefficients
from fsdp.optim.adam8bit.validation import check_group, check_param, check_state
from fsdp.optim.state_dict import unwrap_tensors, wrap_tensors
from fsdp.optim.tensors import parameter_name, placements_of

__all__ = ["Adam8bit"]


class Adam8bit(Optimizer):
    """Adam with block-wise 8-bit moments: a quarter of the state of Adam in fp32.

    Blocks are counted in a parameter's global storage, so training gives the same bits on any
    number of ranks and with any granularity of `fully_shard`. ``step()`` does not communicate if no
    rank boundary splits a block, which ``shard_placement_fn`` ensures with `Block` or `Rows`. If
    one does, as with FSDP2's Shard(0), a warning names the parameter, and each step redistributes
    the parameter and its gradient and the result back: the same bits, but slower. If tensor
    parallelism shards a parameter besides fully_shard, its blocks are those of the local tensor;
    they differ at another tensor-parallel size, and a checkpoint of one does not load at another.

    A step computes in fp32 whatever the parameter's dtype. A moment that is not finite makes its
    whole block NaN, and the parameters of the block from the next step on. On the CPU a warning
    then names the parameter; on other devices the warning would have to wait for the device. It is
    not an error, because the other ranks would wait for a rank that raises.

    Args:
        params: as for any torch optimizer. With ``model.named_parameters()`` warnings and errors
            have the names.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: is added to the root of the second moment.
        weight_decay: weight decay factor.
        block_size: elements that share a scale; torchao and bitsandbytes use 256, the paper 2048.
        min_8bit_size: parameters with fewer elements, mostly norms and biases, have fp32 moments.
        decoupled_weight_decay: True decays the parameter as AdamW does; False adds the decay to
            the gradient as torch's Adam does.

    Raises:
        ValueError: an option is out of range; a parameter is complex, sparse or Partial.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        block_size: int = 256,
        *,
        min_8bit_size: int = 4096,
        decoupled_weight_decay: bool = True,
    ) -> None:
        self._layouts: dict[torch.Tensor, CachedLayout] = {}
        self._warned: set[str] = set()
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "block_size": block_size, "min_8bit_size": min_8bit_size,
            "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as torch's optimizers do, after checking it.

        Raises:
            ValueError: an option is out of range, or a parameter cannot be optimized; the group is
                not added.
        """
        super().add_param_group(param_group)
        try:
            check_group(param_group)
            for i, param in enumerate(param_group["params"]):
                check_param(param, parameter_name(param_group, len(self.param_groups) - 1, i))
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have gradients.

        Args:
            closure: recomputes the loss and its gradients.

        Raises:
            ValueError: a gradient is sparse, or only one of gradient and parameter is a DTensor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: list[ParamUpdate] = []
        for index, group in enumerate(self.param_groups):
            coefficients: dict[float, AdamCoefficients] = {}
            for i, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                name = partial(parameter_name, group, index, i)
                cached = self._layout(param, group, name)
                state = self.state[param]
                if not state:
                    state.update(new_state(param, cached.layout))
                step = state["step"].add_(1).item()
                if step not in coefficients:
                    coefficients[step] = _coefficients(group, int(step))
                updates.append(prepare_update(param, name, state, cached, coefficients[step]))
        for lost in run_updates(updates):
            self._warn_once(_not_finite_warning(lost))
        return loss

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict as torch's optimizers do, but keeps the dtypes of the state.

        Raises:
            ValueError: a state has other keys, dtypes, shapes or placements than the parameter
                needs; the optimizer is unchanged.
        """
        last = self.register_load_state_dict_pre_hook(wrap_tensors)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the optimizer; `load_state_dict` and unpickling end with this call."""
        self.__dict__.setdefault("_layouts", {})
        self.__dict__.setdefault("_warned", set())
        for index, group in enumerate(state["param_groups"]):
            for i, param in enumerate(group["params"]):
                if param_state := state["state"].get(param):
                    state["state"][param] = param_state = unwrap_tensors(param_state, param)
                    name = partial(parameter_name, group, index, i)
                    check_state(param_state, param, self._layout(param, group, name).layout, name())
        super().__setstate__(state)

    def _layout(
        self, param: torch.Tensor, group: dict[str, Any], name: Callable[[], str]
    ) -> CachedLayout:
        """Returns the cached layout of a parameter; warns once if its shards split blocks."""
        cached = self._layouts.get(param)
        if cached is None or not cached.is_valid(param, group):
            cached = self._layouts[param] = CachedLayout.of(param, group)
            if cached.layout is not None and cached.layout.split_at is not None:
                self._warn_once(_split_warning(name(), param, cached.layout.split_at, group))
        return cached

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=3)


def _coefficients(group: dict[str, Any], step: int) -> AdamCoefficients:
    return AdamCoefficients.of_step(
        step, float(group["lr"]), group["betas"], group["eps"], group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
    )  # fmt: skip


def _split_warning(name: str, param: torch.Tensor, split_at: int, group: dict[str, Any]) -> str:
    block_size = group["block_size"]
    row = param.shape[-1] if param.ndim else 1
    rows = block_size // math.gcd(block_size, row)
    return (
        f"Adam8bit: the shards of parameter {name!r}, placed as {placements_of(param)}, split a "
        f"block of {block_size} at element {split_at}. Each step redistributes the parameter and "
        f"its gradient, and the result back; to avoid that, shard it with fsdp.fully_shard and a "
        f"shard_placement_fn that returns Rows({rows}) or Block({block_size})"
    )


def _not_finite_warning(name: str) -> str:
    return (
        f"Adam8bit: the gradient or a moment of parameter {name!r} is not finite on this rank: "
        f"whole blocks of its state are NaN from now on"
    )
