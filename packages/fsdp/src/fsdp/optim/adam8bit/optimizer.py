"""Adam whose moments are 8-bit numbers in blocks that lie whole on ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from fsdp.optim.adam8bit import messages
from fsdp.optim.adam8bit.checking import check_group, check_param, check_state
from fsdp.optim.adam8bit.jobs import Job, Planned, make_job, run
from fsdp.optim.adam8bit.state import new_state
from fsdp.optim.adam8bit.update import Coefficients
from fsdp.optim.keep import keep_tensors, released
from fsdp.optim.tensors import name_of

__all__ = ["Adam8bit"]


class Adam8bit(Optimizer):
    """Adam with block-wise 8-bit moments: a quarter of the state of Adam in fp32.

    Blocks are counted in a parameter's global storage, so training is the same, bit for bit, on
    any number of ranks and under any plan of `fully_shard`. If no rank boundary cuts a block, which
    ``shard_placement_fn`` sees to with `Block` or `Rows`, ``step()`` communicates nothing. If one
    does, as under FSDP2's Shard(0), a warning names the parameter, and each step moves it and its
    gradient to whole blocks and back: slower, and the same bits. Where tensor parallelism shards a
    parameter beside fully_shard, its blocks are those of the local tensor, and they are other ones
    at another tensor-parallel size: such a checkpoint does not load.

    A step computes in fp32 whatever a parameter's dtype is. A moment that is not finite makes its
    whole block NaN, and from the next step on the parameters of the block. On the CPU a warning
    names the parameter then; elsewhere that would have to wait for the device. It is no error,
    because the other ranks would wait for one that raises.

    Args:
        params: as of any torch optimizer. With ``model.named_parameters()`` warnings and errors
            have the names.
        lr: learning rate.
        betas: of the moments.
        eps: added to the root of the second.
        weight_decay: the factor.
        block_size: elements that share a scale; 256 is what torchao and bitsandbytes have, 2048 the
            paper.
        min_8bit_size: parameters of fewer elements, norms and biases mostly, keep fp32 moments.
        decoupled_weight_decay: as AdamW's; False adds it to the gradient, as torch's Adam does.

    Raises:
        ValueError: a number out of range; a parameter that is complex, sparse, or a sum not made.

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
        self._planned: dict[torch.Tensor, Planned] = {}
        self._warned: set[str] = set()
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "block_size": block_size, "min_8bit_size": min_8bit_size,
            "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; numbers and parameters are checked.

        Raises:
            ValueError: a number out of range; a parameter that cannot be optimized.
        """
        super().add_param_group(param_group)
        try:
            check_group(param_group)
            for i, param in enumerate(param_group["params"]):
                check_param(param, name_of(param_group, len(self.param_groups) - 1, i))
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step.

        Args:
            closure: computes the loss and its gradients anew.

        Raises:
            ValueError: a gradient that is sparse, or no DTensor where the parameter is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        jobs: list[Job] = []
        for index, group in enumerate(self.param_groups):
            of_step: dict[float, Coefficients] = {}
            for i, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                name = partial(name_of, group, index, i)
                planned = self._plan(param, group, name)
                state = self.state[param]
                if not state:
                    state.update(new_state(param, planned.layout))
                number = state["step"].add_(1).item()
                if number not in of_step:
                    of_step[number] = _coefficients(group, int(number))
                jobs.append(make_job(param, name, state, planned, of_step[number]))
        for lost in run(jobs):
            self._warn(messages.not_finite(lost))
        return loss

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As torch's, but that no state is cast to its parameter's dtype.

        Raises:
            ValueError: a state that is of another kind, shape or layout than the parameter needs;
                the optimizer stays as it is.
        """
        last = self.register_load_state_dict_pre_hook(keep_tensors)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What `load_state_dict` and unpickling end with."""
        self.__dict__.setdefault("_planned", {})
        self.__dict__.setdefault("_warned", set())
        for index, group in enumerate(state["param_groups"]):
            for i, param in enumerate(group["params"]):
                if of_param := state["state"].get(param):
                    state["state"][param] = of_param = released(of_param, param)
                    name = partial(name_of, group, index, i)
                    check_state(of_param, param, self._plan(param, group, name).layout, name())
        super().__setstate__(state)

    def _plan(self, param: torch.Tensor, group: dict[str, Any], name: Callable[[], str]) -> Planned:
        """What is known of a parameter; a warning the first time that its blocks are cut."""
        planned = self._planned.get(param)
        if planned is None or not planned.holds(param, group):
            planned = self._planned[param] = Planned.of(param, group)
            if planned.layout is not None and planned.layout.cut is not None:
                self._warn(messages.blocks_cut(name(), param, planned.layout.cut, group))
        return planned

    def _warn(self, text: str) -> None:
        """Each text once."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=3)


def _coefficients(group: dict[str, Any], step: int) -> Coefficients:
    return Coefficients.of(
        step, float(group["lr"]), group["betas"], group["eps"], group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
    )  # fmt: skip
