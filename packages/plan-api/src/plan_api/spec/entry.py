"""One call on a plan, as the plan stores it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from plan_api.spec.param_values import ParamValues
from plan_api.spec.path import PathKind, TensorPath

__all__ = ["Entry", "EntryKind", "Phase"]


class EntryKind(enum.Enum):
    """The method of a plan that made an entry."""

    SHARD = "shard"
    REDISTRIBUTE = "redistribute"
    ANNOTATE = "annotate"
    FACTORY = "factory"
    LOCAL = "local"
    INDEX = "index"
    DISPATCH = "dispatch"
    FULLY_SHARD = "fully_shard"
    EAGER = "eager"
    CONTEXT = "context"
    SEQUENCE = "sequence"
    RECOMPUTE = "recompute"
    COMPILE = "compile"
    PRECISION = "precision"

    @property
    def names_modules(self) -> bool:
        """Whether the entry's path names modules instead of tensors."""
        return self in _OF_MODULES


_OF_MODULES = (
    EntryKind.FACTORY, EntryKind.LOCAL, EntryKind.FULLY_SHARD, EntryKind.EAGER, EntryKind.CONTEXT,
    EntryKind.RECOMPUTE, EntryKind.COMPILE, EntryKind.PRECISION,
)  # fmt: skip
_WITHOUT_AXES = (
    EntryKind.EAGER, EntryKind.RECOMPUTE, EntryKind.COMPILE, EntryKind.PRECISION,
)  # fmt: skip


class Phase(enum.Enum):
    """The times in a training step at which a parameter may be placed differently.

    INIT is the placement between steps, and the default of all other phases. RUN is the placement
    in forward and backward: a parameter with another INIT placement is unsharded before its module
    runs and resharded afterwards. OPTIM is the placement that the optimizer and checkpoints see: a
    parameter with another INIT placement is redistributed after the optimizer has changed it, and
    stays unsharded until then. GRAD is the placement of its gradient during backward. Activations
    and buffers have no phases.

    The four kinds of data parallelism (Rajbhandari et al., ZeRO, arXiv 1910.02054) on an axis of N
    ranks, with the parameter elements that each rank stores and the gradient elements that it
    stores and communicates, per element of the parameter:

    ========== ==== ==== ==== ===== =========== ========= ============
    kind       INIT RUN  GRAD OPTIM parameters  gradients communicated
    ========== ==== ==== ==== ===== =========== ========= ============
    replicated R                    1           1         2
    ZeRO-1     R              S(0)  1 + 1/N     1         2
    ZeRO-2     R         S(0) S(0)  1 + 1/N     1/N       2
    ZeRO-3     S(0) R               1/N         1/N       3
    ========== ==== ==== ==== ===== =========== ========= ============
    """

    INIT = "init"
    RUN = "run"
    GRAD = "grad"
    OPTIM = "optim"


@dataclass(frozen=True)
class Entry:
    """One call on a plan.

    Attributes:
        kind: the method that was called.
        path: the tensors or modules that it names.
        axes: names of axes of the plan's mesh.
        dst: the placement on each axis.
        src: the placements before, one per axis; None if not given.
        grad_dst: the placements of the gradient afterwards, one per axis; None if not given.
        grad_src: the placements of the gradient before, one per axis; None if not given.
        phase: the phase of a parameter.
        line: the source line of the call: ``train.py:12``, or ``train.py:12 > zoo/llama.py:38``.
        options: the other arguments of the call, by name.
    """

    kind: EntryKind
    path: TensorPath
    axes: tuple[str, ...]
    dst: tuple[Placement, ...]
    src: tuple[Placement, ...] | None = None
    grad_dst: tuple[Placement, ...] | None = None
    grad_src: tuple[Placement, ...] | None = None
    phase: Phase = Phase.INIT
    line: str = field(default="", compare=False)
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        if self.kind in _WITHOUT_AXES:
            return f"{self.kind.value}({self.path.text!r}{options})"
        if self.kind is EntryKind.FULLY_SHARD:
            return f"{self.kind.value}({self.path.text!r}, {', '.join(self.axes)}{options})"
        placed = ", ".join(map(self._placement_text, range(len(self.axes))))
        when = f", phase={self.phase.name}" if self.path.kind is PathKind.STATE else ""
        return f"{self.kind.value}({self.path.text!r}, {placed}{when}{options})"

    def _placement_text(self, at: int) -> str:
        before = "" if self.src is None else f"{self.src[at]}->"
        back = "" if self.grad_dst is None else f"->{self.grad_dst[at]}"
        back = back if self.grad_src is None else f"{self.grad_src[at]}{back}"
        return f"{self.axes[at]}={before}{self.dst[at]}{f' (gradient {back})' if back else ''}"

    def under(self, prefix: str) -> Entry:
        """Returns the entry in a model that has this one's as its submodule ``prefix``."""
        options = tuple(
            (name, value.under(prefix) if isinstance(value, ParamValues) else value)
            for name, value in self.options
        )
        return replace(self, path=self.path.under(prefix), options=options)

    @property
    def description(self) -> str:
        """The entry with its source line, as error messages begin."""
        return f"{self.line}: {self}" if self.line else str(self)
