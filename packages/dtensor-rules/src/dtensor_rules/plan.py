"""How one kind of call is executed; what rules and torch's propagation are turned into.

Note: a *plan* says what happens on this rank: which local tensors are transformed first (*moves*),
which other arguments get local values (*values*), whether another operator is called instead, and
the specs of the results (*outputs*). C++ keeps it and runs it (plan.h). A call that no plan can
hold has a *reason* instead, and is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from dtensor_rules import _core

Transform = _core.Transform | Callable[[torch.Tensor], torch.Tensor]
Output = DTensorSpec | list[DTensorSpec | None] | Callable[[torch.Tensor], DTensorSpec] | None


@dataclass(frozen=True)
class Move:
    """A tensor argument that is transformed before the operator.

    Attributes:
        argument: position in the operator's schema.
        element: position in the list that the argument is; -1 where it is no list.
        transform: from the local tensor to the local tensor that the operator gets.
        target: what a redistribution makes of it; None for other transforms. It is for logs.
    """

    argument: int
    element: int
    transform: Transform
    target: DTensorSpec | None = None


@dataclass(frozen=True)
class Plan:
    """How calls with one key are executed.

    Attributes:
        reason: why the call is torch's (stats() shows it); None for a plan that is run.
        cacheable: False for an answer that holds for this call only.
        moves: in the order of the arguments.
        values: of arguments that are no tensors, by position, where they differ from the call's.
        instead: the operator to call, where it is another.
        outputs: per result of the operator: None (as it is), a spec, a function that makes the
            spec from the local result of the first run, or for a list of tensors a list of specs
            (None: as it is).
        given: by position, the specs that `out=` arguments have afterwards; they are the results.
        finish: makes the result from the local result, for operators with one result that is no
            tensor.
        rule: counts the runs of a plan that a rule made.
    """

    reason: str | None = None
    cacheable: bool = True
    moves: Sequence[Move] = ()
    values: Mapping[int, object] = field(default_factory=dict)
    instead: torch._ops.OpOverload | None = None
    outputs: Sequence[Output] = ()
    given: Mapping[int, DTensorSpec] = field(default_factory=dict)
    finish: _core.Finish | Callable[[Any], Any] | None = None
    rule: _core.RuleCounter | None = None
