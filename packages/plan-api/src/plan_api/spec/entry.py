"""One call on a plan, as it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from plan_api.spec.path import Kind, TensorPath
from plan_api.spec.phase import Phase
from plan_api.spec.verb import Verb

__all__ = ["Entry"]


@dataclass(frozen=True)
class Entry:
    """One call on a plan.

    Attributes:
        verb: what is done.
        path: with which tensors.
        axes: of the plan's mesh, by name.
        dst: a placement per axis.
        src: what they are before, per axis; None where nothing was said.
        grad_dst: of the gradient, on its way back; None where nothing was said.
        grad_src: what the gradient is before; None where nothing was said.
        phase: when.
        line: where it was written, as ``train.py:12``, or ``train.py:12 > zoo/llama.py:38``.
        options: what else the verb was given, by name.
    """

    verb: Verb
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
        if self.verb is Verb.EAGER:
            return f"{self.verb.value}({self.path.text!r})"
        if self.verb is Verb.FULLY_SHARD:
            return f"{self.verb.value}({self.path.text!r}, {', '.join(self.axes)}{options})"
        placed = ", ".join(map(self._placed, range(len(self.axes))))
        when = f", phase={self.phase.name}" if self.path.kind is Kind.STATE else ""
        return f"{self.verb.value}({self.path.text!r}, {placed}{when}{options})"

    def _placed(self, at: int) -> str:
        before = "" if self.src is None else f"{self.src[at]}->"
        back = "" if self.grad_dst is None else f"->{self.grad_dst[at]}"
        back = back if self.grad_src is None else f"{self.grad_src[at]}{back}"
        return f"{self.axes[at]}={before}{self.dst[at]}{f' (gradient {back})' if back else ''}"

    @property
    def said(self) -> str:
        """The entry with its line, as errors begin."""
        return f"{self.line}: {self}" if self.line else str(self)
