"""What Muon and SOAP have in common: groups of matrices, and AdamW for the other parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, overload

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from fsdp.optim.owned.matrices import Split, SplitFunction, rows_of
from fsdp.optim.owned.settings import adamw_options, check_state
from fsdp.optim.owned.work import Planner, Work
from fsdp.optim.tensors import local_of, name_of

__all__ = ["Group", "MatrixOptimizer"]

Group = dict[str, Any]


class MatrixOptimizer(Optimizer):
    """An optimizer of whole matrices, each computed on by its owner, and AdamW for the others.

    Groups whose flag is False, as ``use_muon``, are AdamW's.

    Args:
        params: parameters or groups of them, with names or without.
        defaults: the options of groups of matrices.
        split: which rows of a parameter are matrices by themselves; of groups that say no other.
        bucket_mb: of the matrices that travel at the same time.

    Raises:
        ValueError: options out of range; a parameter that is no matrix, naming it.
    """

    who: ClassVar[str]  # in errors, and in the flag of groups

    def __init__(
        self,
        params: ParamsT,
        defaults: Group,
        split: Split | SplitFunction,
        bucket_mb: float,
    ) -> None:
        if bucket_mb <= 0:
            raise ValueError(f"{self.who}: bucket_mb={bucket_mb}; wants more than 0")
        self._bucket_bytes = int(bucket_mb * 2**20)
        self._names: dict[torch.Tensor, str] = {}
        self._rows: dict[torch.Tensor, tuple[int, ...]] = {}
        self._work: Work | None = None
        self._adamw: torch.optim.AdamW | None = None
        self._flag = f"use_{self.who.lower()}"
        super().__init__(params, defaults | {self._flag: True, "split": split})

    @abstractmethod
    def _check_options(self, group: Group) -> None:
        """Raises where an option of a group of matrices is out of range."""

    @abstractmethod
    def _planner(self) -> Planner:
        """How matrices get their owners."""

    @abstractmethod
    def _step_matrices(self, work: Work) -> None:
        """A step of the parameters that are matrices and have gradients."""

    def add_param_group(self, param_group: Group) -> None:
        """As of torch's optimizers; a group may have the flag, and ``split``.

        Raises:
            ValueError: as the optimizer itself.
        """
        if not param_group.get(self._flag, True):
            param_group = adamw_options(self.defaults, self._flag) | param_group
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._take(group, len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise

    def _take(self, group: Group, index: int) -> None:
        split = group.pop("split", None)  # functions do not go into checkpoints
        for i, param in enumerate(group["params"]):
            self._names[param] = name_of(group, index, i)
        if group[self._flag]:
            self._check_options(group)
            for param in group["params"]:
                self._rows[param] = rows_of(split, param, self._names[param], self.who)
        else:
            others = adamw_options(self.defaults, self._flag)
            for key in self.defaults.keys() - others.keys():
                group.pop(key, None)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of all parameters that have gradients.

        Args:
            closure: computes the loss again.

        Raises:
            ValueError: a gradient that lies otherwise than its parameter; or on every rank, where
                ranks have gradients of different parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = self._plan()
        work.check_ranks(self.who)
        self._step_matrices(work)
        self._step_others()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch's optimizers.

        Raises:
            ValueError: state that lies otherwise than its parameter, naming it.
        """
        before = self.state, self.param_groups
        super().load_state_dict(state_dict)
        try:
            self._check_state()
        except ValueError:
            self.state, self.param_groups = before
            raise

    def _matrix_params(self) -> list[tuple[torch.Tensor, Group]]:
        """Those that are matrices, with their groups; work counts them in this order."""
        return [
            (p, group) for group in self.param_groups if group[self._flag] for p in group["params"]
        ]

    def _plan(self) -> Work:
        params = [param for param, _ in self._matrix_params()]
        names = [self._names[param] for param in params]
        self._work = self._planner().plan(params, names, self._work)
        return self._work

    def _check_state(self) -> None:
        check_state(self.state, self._names, self.who)

    def owners(self) -> dict[str, int | None]:
        """The rank of the cut axis that computes on each matrix of the last step, by name.

        None of a matrix that every rank has whole: each of them computes on it.
        """
        return {job.matrix.name: job.owner for job in self._work.jobs} if self._work else {}

    def _grad_of(self, param: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient, flat."""
        grad = param.grad
        assert grad is not None
        if grad.is_sparse or getattr(grad, "placements", ()) != getattr(param, "placements", ()):
            raise ValueError(
                f"{self.who}: the gradient of parameter {self._names[param]!r} is {grad.layout}, "
                f"placed as {getattr(grad, 'placements', 'a plain tensor')}; wants it as the "
                f"parameter is"
            )
        return local_of(grad).reshape(-1)

    def _step_others(self) -> None:
        groups = [group for group in self.param_groups if not group[self._flag]]
        if groups:
            if self._adamw is None:
                self._adamw = torch.optim.AdamW(groups)
            self._adamw.param_groups, self._adamw.state = groups, self.state
            self._adamw.step()
