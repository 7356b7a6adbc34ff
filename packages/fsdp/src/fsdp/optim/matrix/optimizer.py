"""The base class of Muon and SOAP: groups of matrices, and AdamW for the other parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias, overload

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from fsdp.optim.matrix.assignment import OwnerPlan, OwnerPlanner
from fsdp.optim.matrix.split import (
    SplitOption,
    SplitPatterns,
    matrix_rows,
    split_by_name,
)
from fsdp.optim.state_dict import check_state_sharding
from fsdp.optim.tensors import local_of, parameter_name

__all__ = ["MatrixOptimizer", "ParamGroup"]

ParamGroup: TypeAlias = dict[str, Any]


class MatrixOptimizer(Optimizer):
    """An optimizer of matrices, each computed by its owner, and AdamW for other parameters.

    Groups whose flag (``use_muon``, ``use_soap``) is False are optimized by AdamW; groups of
    matrices do not have the flag, so that their keys are those of torch's optimizers.

    Args:
        params: parameters or groups of them, with names or without.
        defaults: options of the groups of matrices.
        split: which rows of a parameter are separate matrices, or a mapping from patterns of names
            to this; default of the groups.
        bucket_mb: size of the matrices that are exchanged at the same time, in MiB.

    Raises:
        ValueError: an option is out of range; a parameter is not a matrix, which it names.
    """

    optimizer_name: ClassVar[str]  # in errors, and in the flag of groups
    # Options that groups do not have where they are None, as torch's optimizer has no such key.
    additional_options: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        params: ParamsT,
        defaults: ParamGroup,
        split: SplitOption,
        bucket_mb: float,
    ) -> None:
        if bucket_mb <= 0:
            raise ValueError(
                f"{self.optimizer_name}: expected bucket_mb to be positive, got {bucket_mb}"
            )
        self._bucket_bytes = int(bucket_mb * 2**20)
        self._names: dict[torch.Tensor, str] = {}
        self._rows: dict[torch.Tensor, tuple[int, ...]] = {}
        self._owner_plan: OwnerPlan | None = None
        self._adamw: torch.optim.AdamW | None = None
        self._flag = f"use_{self.optimizer_name.lower()}"
        self._default_split, self._matched_patterns = split, set[str]()
        super().__init__(params, defaults | {self._flag: True, "split": split})
        if isinstance(split, Mapping):
            self._check_patterns_matched(split, self._matched_patterns)

    @abstractmethod
    def _check_options(self, group: ParamGroup) -> None:
        """Raises ValueError if an option of a group of matrices is out of range."""

    @abstractmethod
    def _planner(self) -> OwnerPlanner:
        """Returns the planner that assigns owners to matrices."""

    @abstractmethod
    def _step_matrices(self, plan: OwnerPlan) -> None:
        """Updates the parameters that are matrices and have gradients."""

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a parameter group, as torch's optimizers do; it may have the flag and ``split``.

        The patterns of a group's own ``split`` have to match parameters of the group.

        Raises:
            ValueError: an option is out of range, or of matrices in a group of AdamW; a parameter
                is not a matrix; or a pattern of ``split`` matches no parameter. The group is not
                added.
        """
        if not param_group.get(self._flag, True):
            adamw = _adamw_options(self.defaults, self._flag)
            if ignored := sorted(param_group.keys() & (self.defaults.keys() - adamw.keys())):
                raise ValueError(
                    f"{self.optimizer_name}: expected a group with {self._flag}=False to have "
                    f"options of AdamW, got {', '.join(ignored)}; remove them"
                )
            param_group = adamw | param_group
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._register_group(group, len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise

    def _register_group(self, group: ParamGroup, index: int) -> None:
        split: SplitOption = group.pop("split", None)  # checkpoints cannot store functions
        for i, param in enumerate(group["params"]):
            self._names[param] = parameter_name(group, index, i)
        if group[self._flag]:
            self._check_options(group)
            del group[self._flag]
            for key in self.additional_options:
                if group[key] is None:
                    del group[key]
            self._register_rows(group, split)
        else:
            adamw = _adamw_options(self.defaults, self._flag)
            for key in self.defaults.keys() - adamw.keys():
                group.pop(key, None)

    def _register_rows(self, group: ParamGroup, split: SplitOption) -> None:
        """Determines the rows of the matrices of a group's parameters."""
        if isinstance(split, Mapping) and group.get("param_names") is None:
            raise ValueError(
                f"{self.optimizer_name}: expected parameters with names, as split has patterns of "
                f"names, got parameters without; pass named_parameters()"
            )
        matched: set[str] = set()
        for param in group["params"]:
            name = self._names[param]
            if not isinstance(split, Mapping):
                own = split
            elif (pattern := split_by_name(split, name, self.optimizer_name)) is not None:
                matched.add(pattern)
                own = split[pattern]
            else:
                own = None
            self._rows[param] = matrix_rows(own, param, name, self.optimizer_name)
        if split is self._default_split:
            self._matched_patterns |= matched  # of all groups
        elif isinstance(split, Mapping):
            self._check_patterns_matched(split, matched)

    def _check_patterns_matched(self, split: SplitPatterns, matched: set[str]) -> None:
        if unmatched := [pattern for pattern in split if pattern not in matched]:
            raise ValueError(
                f"{self.optimizer_name}: expected each pattern of split to match the name of a "
                f"parameter of a group with {self._flag}=True, got {unmatched}, which match none; "
                f"a pattern has to match the whole name"
            )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates all parameters that have gradients.

        Args:
            closure: recomputes the loss and its gradients.

        Raises:
            ValueError: a gradient is not placed as its parameter; or, on every rank, ranks have
                gradients of different parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._plan()
        plan.check_ranks_agree(self.optimizer_name)
        self._step_matrices(plan)
        self._step_adamw()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict as torch's optimizers do.

        Options that it does not have, as those of other optimizers, are unchanged.

        Raises:
            ValueError: state is sharded differently from its parameter, which it names; the
                optimizer is unchanged.
        """
        before = self.state, self.param_groups
        super().load_state_dict(state_dict)
        for group, old in zip(self.param_groups, before[1], strict=True):
            for key, value in old.items():
                group.setdefault(key, value)
        try:
            self._check_state()
        except ValueError:
            self.state, self.param_groups = before
            raise

    def owners(self) -> dict[str, int | None]:
        """Returns the rank of the shard axis that owns each matrix of the last step, by name.

        The owner is None if every rank has the whole matrix and computes on it.
        """
        if self._owner_plan is None:
            return {}
        return {task.matrix.name: task.owner for task in self._owner_plan.tasks}

    def _matrix_params(self) -> list[tuple[torch.Tensor, ParamGroup]]:
        """Returns the matrix parameters and their groups; plans index them in this order."""
        return [
            (param, group)
            for group in self.param_groups
            if group.get(self._flag, True)
            for param in group["params"]
        ]

    def _plan(self) -> OwnerPlan:
        params = [param for param, _ in self._matrix_params()]
        names = [self._names[param] for param in params]
        self._owner_plan = self._planner().plan(params, names, self._owner_plan)
        return self._owner_plan

    def _check_state(self) -> None:
        check_state_sharding(self.state, self._names, self.optimizer_name)

    def _local_grad(self, param: torch.Tensor) -> torch.Tensor:
        """Returns the local tensor of a gradient, flat."""
        grad = param.grad
        assert grad is not None
        if grad.is_sparse or getattr(grad, "placements", ()) != getattr(param, "placements", ()):
            raise ValueError(
                f"{self.optimizer_name}: expected the gradient of parameter {self._names[param]!r} "
                f"to be dense and placed as {getattr(param, 'placements', 'a plain tensor')}, got "
                f"a {grad.layout} one placed as {getattr(grad, 'placements', 'a plain tensor')}"
            )
        return local_of(grad).reshape(-1)

    def _step_adamw(self) -> None:
        groups = [group for group in self.param_groups if not group.get(self._flag, True)]
        if groups:
            if self._adamw is None:
                self._adamw = torch.optim.AdamW(groups)
            self._adamw.param_groups, self._adamw.state = groups, self.state
            self._adamw.step()


def _adamw_options(defaults: Mapping[str, Any], flag: str) -> ParamGroup:
    """Returns AdamW's default options, with the learning rate and weight decay of the optimizer."""
    lr, weight_decay = defaults["lr"], defaults["weight_decay"]
    dummy = [torch.zeros(1, requires_grad=True)]
    options: dict[str, Any] = dict(torch.optim.AdamW(dummy, float(lr)).defaults)
    return options | {"lr": lr, "weight_decay": weight_decay, flag: False}
