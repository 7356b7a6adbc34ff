"""What a plan becomes for one model: operations at sites, frozen, that read as they act.

An operation is one tensor, at one site, along one axis:

    layers.0.mlp.forward_pre:<in>:0:redist(->R, tp)

`fuse.py` puts those of one site together, and `hooks.py` makes them a hook of torch's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["Act", "Moment", "Op", "short", "spelled"]


class Moment(Enum):
    """When: in a phase of parameters, before or after a module runs, or as it calls an operator."""

    INIT = "init"
    OPTIM = "optim"
    RUN = "run"
    FORWARD_PRE = "forward_pre"
    FORWARD = "forward"
    GRAD = "grad"
    OPERATOR = "op"

    @property
    def of_state(self) -> bool:
        """Whether it is a phase of parameters."""
        return not self.of_activations and self is not Moment.OPERATOR

    @property
    def of_activations(self) -> bool:
        """Whether it is a hook of what modules are given and return."""
        return self in (Moment.FORWARD_PRE, Moment.FORWARD)


class Act(Enum):
    """What an operation does; in the order in which those on one tensor are done."""

    SHARD = "shard"  # a parameter becomes a DTensor
    ANNOTATE = "annotate"  # a local tensor is said to be one, without communication
    FACTORY = "factory"  # what a module makes while it runs becomes a DTensor
    INDEX = "index"  # an argument counts what this rank has of the parameters that are cut
    DISPATCH = "dispatch"  # that, and what has chosen a part is sent to the rank that has it
    LOCAL = "local"  # a module runs on local tensors; what it returns becomes one
    ORDER = "order"  # a sequence is put into the order in which ranks have it
    CONTEXT = "context"  # attention of a module is over a sequence that is cut
    REDIST = "redist"  # what may be a plain tensor is moved


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        path: of the module.
        moment: when.
        tensor: a parameter's or buffer's name in its module, ``<in>``, ``<out>``, ``<op>``; of
            FACTORY ``<new>``, of INDEX and DISPATCH ``<index>``, of CONTEXT ``<attention>``.
        index: of the argument or result, by number or name; of an operator its function.
        act: what is done.
        axis: of the mesh, by name.
        dst: the placement along it afterwards.
        src: that before; None where the plan does not say.
        grad_dst: of the gradient on its way back.
        grad_src: what that is before.
        entry: the number of the plan's entry that asks for it.
        options: of ORDER and CONTEXT, what else the entry says, by name.
        line: where that entry was written.
    """

    path: str
    moment: Moment
    tensor: str
    index: int | str
    act: Act
    axis: str
    dst: Placement
    src: Placement | None
    grad_dst: Placement | None
    grad_src: Placement | None
    entry: int
    options: tuple[tuple[str, Any], ...] = ()
    line: str = field(default="", compare=False)

    @property
    def target(self) -> tuple[str, Moment, str, int | str, Act, str]:
        """What two operations cannot both decide."""
        return (self.path, self.moment, self.tensor, self.index, self.act, self.axis)

    def __str__(self) -> str:
        site = f"{self.path}.{self.moment.value}" if self.path else self.moment.value
        before = "" if self.src is None else short(self.src)
        move = f"{before}->{short(self.dst)}, {self.axis}"
        if self.grad_dst is not None or self.grad_src is not None:
            back = "" if self.grad_src is None else short(self.grad_src)
            to = "" if self.grad_dst is None else short(self.grad_dst)
            move += f", grad {back}->{to}"
        move += "".join(f", {name}={value!r}" for name, value in self.options)
        return f"{site}:{self.tensor}:{self.index}:{self.act.value}({move})"


def short(placement: Placement) -> str:
    """``R``, ``S(0)``, ``P``, ``P(avg)``; of other placements what `str` gives."""
    if type(placement) is Replicate:
        return "R"
    if type(placement) is Shard:
        return f"S({placement.dim})"
    if type(placement) is Partial:
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return str(placement)


def spelled(placement: Placement) -> str:
    """As a script says it: ``Replicate()``, ``Shard(0)``, ``Partial()``, ``Partial("avg")``."""
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    if type(placement) is Partial:
        return "Partial()" if placement.reduce_op == "sum" else f'Partial("{placement.reduce_op}")'
    return repr(placement)
