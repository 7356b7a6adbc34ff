"""The intermediate representation: what a plan becomes for one model.

Note: an *operation* (`Op`) acts on one tensor, at a hook point of a module, along one mesh axis:

    layers.0.mlp.forward_pre:<in>:0:redist(->R, tp)

A *step* (`SiteStep`) fuses the operations on one tensor along all axes. A *site* (`Site`) is a
module and a hook point with all its steps, and becomes one hook. All of it is frozen and holds no
reference to the plan: the runtime reads nothing but this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.model_names import is_inside
from plan_api.ops.low_precision.recipes import Recipe
from plan_api.spec.entry import Entry
from plan_api.spec.placements import format_placement
from plan_api.spec.policies import PolicyValue

__all__ = [
    "AxisMove", "EntryRef", "ExpertIndices", "FullyShard", "HookPoint", "Lowered", "ModulePolicy",
    "Op", "OpKind", "Override", "PhasePlacements", "QuantizedGather", "Schedule", "ShardValues",
    "Site", "SiteStep",
    "TokenDispatch", "UnevenUnits",
    "gradient_placements",
]  # fmt: skip

_Options: TypeAlias = tuple[tuple[str, Any], ...]
_Placements: TypeAlias = tuple[Placement, ...]


class HookPoint(Enum):
    """When an operation acts: in a phase of a parameter, or around a forward or an operator."""

    INIT = "init"
    OPTIM = "optim"
    RUN = "run"
    FORWARD_PRE = "forward_pre"
    FORWARD = "forward"
    GRAD = "grad"
    OPERATOR = "op"

    @property
    def is_phase(self) -> bool:
        """Whether it is a phase of parameters."""
        return not self.is_module_hook and self is not HookPoint.OPERATOR

    @property
    def is_module_hook(self) -> bool:
        """Whether it is a hook on the inputs or outputs of modules."""
        return self in (HookPoint.FORWARD_PRE, HookPoint.FORWARD)


class OpKind(Enum):
    """What an operation does; operations on one tensor are done in this order."""

    SHARD = "shard"  # makes a parameter a DTensor
    ANNOTATE = "annotate"  # makes a local tensor a DTensor, without communication
    FACTORY = "factory"  # makes tensors that a module creates in its forward DTensors
    INDEX = "index"  # renumbers an argument that indexes into sharded parameters
    DISPATCH = "dispatch"  # the same, and sends tokens to the ranks that have what they chose
    LOCAL = "local"  # runs a module on local tensors, and makes its outputs DTensors
    ORDER = "order"  # reorders a sequence to the order in which ranks have it
    CONTEXT = "context"  # computes a module's attention over a sharded sequence
    REDIST = "redist"  # redistributes a DTensor, or a plain tensor as one


@dataclass(frozen=True)
class EntryRef:
    """The entry of a plan that an operation comes from.

    Attributes:
        number: of the entry in the plan.
        line: the source line of the entry.
        description: the entry with its source line, as error messages begin.
        options: all options of the entry, by name.
    """

    number: int
    line: str = field(default="", compare=False)
    description: str = field(default="", compare=False)
    options: _Options = field(default=(), compare=False)


@dataclass(frozen=True)
class Op:
    """One operation on one tensor, along one axis.

    Attributes:
        path: of the module.
        hook_point: when it acts.
        tensor: the name of a parameter or buffer in its module, ``<in>``, ``<out>`` or ``<op>``;
            ``<new>`` for FACTORY, ``<index>`` for INDEX and DISPATCH, ``<attention>`` for CONTEXT.
        index: the number or name of the argument or result, or the name of the operator's function.
        kind: what it does.
        axis: the name of the mesh axis.
        dst: the placement along the axis afterwards.
        src: the placement before; None if the plan does not give it.
        grad_dst: the placement of the gradient afterwards.
        grad_src: the placement of the gradient before.
        entry: the plan's entry that it comes from.
        options: the options of the entry that change what FACTORY, ORDER and CONTEXT do, and how
            DISPATCH overlaps.
    """

    path: str
    hook_point: HookPoint
    tensor: str
    index: int | str
    kind: OpKind
    axis: str
    dst: Placement
    src: Placement | None
    grad_dst: Placement | None
    grad_src: Placement | None
    entry: EntryRef
    options: _Options = ()

    @property
    def target(self) -> tuple[str, HookPoint, str, int | str, OpKind, str]:
        """The key on which a later operation overrides an earlier one."""
        return (self.path, self.hook_point, self.tensor, self.index, self.kind, self.axis)

    def __str__(self) -> str:
        site = f"{self.path}.{self.hook_point.value}" if self.path else self.hook_point.value
        before = "" if self.src is None else format_placement(self.src)
        move = f"{before}->{format_placement(self.dst)}, {self.axis}"
        if self.grad_dst is not None or self.grad_src is not None:
            back = "" if self.grad_src is None else format_placement(self.grad_src)
            to = "" if self.grad_dst is None else format_placement(self.grad_dst)
            move += f", grad {back}->{to}"
        move += "".join(f", {name}={value!r}" for name, value in self.options)
        return f"{site}:{self.tensor}:{self.index}:{self.kind.value}({move})"


@dataclass(frozen=True)
class AxisMove:
    """The placements of a step along one axis; see `Op`."""

    dst: Placement
    src: Placement | None = None
    grad_dst: Placement | None = None
    grad_src: Placement | None = None
    options: _Options = ()


@dataclass(frozen=True)
class SiteStep:
    """The operations on one tensor at a site, along all axes at once.

    Attributes:
        tensor: as in `Op`.
        index: as in `Op`.
        kind: as in `Op`.
        moves: by axis.
        entries: the numbers of the plan's entries that it comes from; none for a call of
            `plan_api.redistribute`, whose file is `tensor`, and whose line is `index`.
        lines: the source lines of these entries.
    """

    tensor: str
    index: int | str
    kind: OpKind
    moves: Mapping[str, AxisMove]
    entries: tuple[int, ...]
    lines: tuple[str, ...] = field(default=(), compare=False)

    @property
    def source(self) -> str:
        """What says how tensors are placed, for errors."""
        return "the plan" if self.entries else "the call"

    @property
    def description(self) -> str:
        """The entries' numbers and lines, for reports and errors."""
        if not self.entries:
            return f"the call in {self.tensor}:{self.index}"
        numbers = " and ".join(map(str, self.entries))
        return f"entry {numbers} of the plan" + f" ({', '.join(self.lines)})" * bool(self.lines)


_NOT_REDISTRIBUTED = (
    OpKind.FACTORY, OpKind.INDEX, OpKind.DISPATCH, OpKind.LOCAL, OpKind.CONTEXT,
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A module and a hook point, with all steps there: one hook."""

    path: str
    hook_point: HookPoint
    steps: tuple[SiteStep, ...]

    @property
    def name(self) -> str:
        """The site as error messages name it, such as ``layers.0.mlp.forward_pre``."""
        return f"{self.path}.{self.hook_point.value}" if self.path else self.hook_point.value

    def __str__(self) -> str:
        return self.name

    @property
    def moved(self) -> tuple[SiteStep, ...]:
        """The steps that the site's own hook applies; `plan_api.ops` installs the others."""
        return tuple(step for step in self.steps if step.kind not in _NOT_REDISTRIBUTED)


@dataclass(frozen=True)
class PhasePlacements:
    """The placements that a plan gives one parameter or buffer in each phase; see `Phase`.

    Attributes:
        phases: those that entries name; the others follow from them.
        init: the placements after `parallelize`.
        rest: those of the optimizer and of checkpoints.
        run: those while its module runs.
        gradient: those of its gradient during backward.
        entries: the numbers of the plan's entries that they come from.
        lines: the source lines of these entries.
    """

    phases: frozenset[HookPoint]
    init: _Placements
    rest: _Placements
    run: _Placements
    gradient: _Placements
    entries: tuple[int, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Schedule:
    """The placements of one parameter or buffer in the phases of a step; see `Phase`.

    Attributes:
        rest: the placements of the DTensor that the model, the optimizer and checkpoints have.
        run: the placements while its module runs.
        keeps_unsharded: whether the unsharded parameter stays allocated until the optimizer changes
            the sharded one.
        reduces_at_end: whether its gradients stay unsharded until the end of backward.
        entries: the numbers of the plan's entries that it comes from.
        lines: the source lines of these entries.
    """

    rest: _Placements
    run: _Placements
    keeps_unsharded: bool = False
    reduces_at_end: bool = False
    entries: tuple[int, ...] = ()
    lines: tuple[str, ...] = field(default=(), compare=False)

    @property
    def has_phases(self) -> bool:
        """Whether the parameter is unsharded while its module runs."""
        return self.rest != self.run

    def at(self, hook_point: HookPoint) -> _Placements:
        """Returns the placements in a phase; for GRAD, if the gradient is reduced at once."""
        unsharded = hook_point is HookPoint.RUN or (
            hook_point is HookPoint.INIT and self.keeps_unsharded
        )
        return self.run if unsharded else self.rest


@dataclass(frozen=True)
class TokenDispatch:
    """How the tokens of a module are sent to the ranks of the experts that they chose.

    Attributes:
        tokens: the position and the name of the argument with one row per token.
        weights: the position and the name of the argument with one weight per assignment of a
            token to an expert; None if assignments have no weights.
        experts: the expert numbers of each rank along the axes, the first axis outermost.
        step: of the plan.
        chunks: parts of the tokens that are sent one by one.
        overlap: the name of a module beside this one that runs while results are sent.
    """

    tokens: tuple[int, str]
    weights: tuple[int, str] | None
    experts: tuple[range, ...]
    step: SiteStep
    chunks: int = 1
    overlap: str | None = None


@dataclass(frozen=True)
class ExpertIndices:
    """An argument of a module that indexes into parameters sharded by expert.

    Attributes:
        argument: the position and the name of the argument.
        own: the expert numbers of this rank.
        axes: the numbers of the mesh axes along which experts are sharded.
        attributes: attributes of the module with this rank's values, set while it runs.
        step: of the plan.
        dispatch: how tokens are sent to the ranks of their experts; None: all ranks along the axes
            have all tokens, and skip the experts of other ranks.
    """

    argument: tuple[int, str]
    own: range
    axes: tuple[int, ...]
    attributes: Mapping[str, Any]
    step: SiteStep
    dispatch: TokenDispatch | None = None


@dataclass(frozen=True)
class FullyShard:
    """A module that the fsdp package is applied to.

    Attributes:
        axes: names of the mesh axes.
        options: of the entry, by name.
        text: the entry.
        line: the source line of the entry.
    """

    axes: tuple[str, ...]
    options: _Options
    text: str
    line: str = field(default="", compare=False)

    @classmethod
    def of(cls, entry: Entry) -> FullyShard:
        """Returns what an entry of a plan applies to each of its modules."""
        return cls(entry.axes, entry.options, str(entry), entry.line)

    def __str__(self) -> str:
        return self.text

    @property
    def description(self) -> str:
        """The entry with its source line, as error messages begin."""
        return f"{self.line}: {self.text}" if self.line else self.text


@dataclass(frozen=True)
class QuantizedGather:
    """An input of a module that ranks quantize before they gather it.

    Attributes:
        path: of the module.
        index: the number or name of the argument.
        axis: the name of the mesh axis.
        dim: of the sequence.
        recipe: of the linear layers.
        layers: the paths of the linear layers.
        lines: the source lines of the entries that gather the input.
    """

    path: str
    index: int | str
    axis: str
    dim: int
    recipe: Recipe
    layers: tuple[str, ...]
    lines: tuple[str, ...] = field(default=(), compare=False)

    @property
    def what(self) -> str:
        """The input as messages name it."""
        return f"{self.path}.forward_pre:<in>:{self.index}".lstrip(".")


@dataclass(frozen=True)
class UnevenUnits:
    """A module in which ranks along an axis have different numbers of units, such as heads.

    Attributes:
        region: the path of the module whose projections are sharded in units.
        axis: the name of the axis.
    """

    region: str
    axis: str


@dataclass(frozen=True)
class ShardValues:
    """The values of options of fully_shard that one parameter has.

    Attributes:
        granularity: of its shards; None is the package's default.
        quantize: the form in which it is gathered; None: as it is.
        operand: the recipe in whose operands it is gathered; None: no products take these.
    """

    granularity: PolicyValue | None = None
    quantize: PolicyValue | None = None
    operand: Recipe | None = None

    def __str__(self) -> str:
        shown = {
            "granularity": self.granularity,
            "quantize": self.quantize,
            "operand": self.operand,
        }
        return ", ".join(f"{name}={one}" for name, one in shown.items() if one is not None)


@dataclass(frozen=True)
class ModulePolicy:
    """How a module runs: what an entry of `Plan.recompute`, `compile` or `precision` says of it.

    Attributes:
        value: of the entry: the name of the policy or the backend, or the `Recipe`.
        text: the entry.
        line: the source line of the entry.
    """

    value: Any
    text: str
    line: str = field(default="", compare=False)

    @property
    def description(self) -> str:
        """The entry with its source line, as error messages begin."""
        return f"{self.line}: {self.text}" if self.line else self.text


@dataclass(frozen=True)
class Override:
    """Two operations, or two entries of fully_shard, with one target: the later one applies."""

    earlier: Op | FullyShard
    later: Op | FullyShard

    def __str__(self) -> str:
        return f"{self.earlier} is overridden by {self.later}"


@dataclass(frozen=True)
class Lowered:
    """A plan lowered for one model.

    Attributes:
        ops: the operations that apply, in the order of the plan.
        overrides: the operations that do not apply, each with the one that overrides it.
        sites: the operations, fused.
        schedules: of the parameters and buffers that the plan names, by their first name.
        indices: the arguments that index into sharded parameters, by the path of their module.
        fully_sharded: the modules that the fsdp package is applied to, by path.
        shard_values: of the parameters of these modules that have any, by their first names.
        eager: the modules that run on DTensors in static mode; none is inside another.
        recomputed: the modules whose activations are recomputed in backward, by path.
        compiled: the modules that torch.compile compiles, by path.
        precisions: the linear layers that compute in low precision, by path.
        quantized_gathers: the inputs of such layers that are gathered quantized.
        uneven_units: where ranks have different numbers of units; in static mode only.
    """

    ops: tuple[Op, ...]
    overrides: tuple[Override, ...]
    sites: tuple[Site, ...]
    schedules: Mapping[str, Schedule]
    indices: Mapping[str, Sequence[ExpertIndices]]
    fully_sharded: Mapping[str, FullyShard]
    shard_values: Mapping[str, ShardValues]
    eager: tuple[str, ...]
    recomputed: Mapping[str, ModulePolicy]
    compiled: Mapping[str, ModulePolicy]
    precisions: Mapping[str, ModulePolicy]
    quantized_gathers: tuple[QuantizedGather, ...] = ()
    uneven_units: tuple[UnevenUnits, ...] = ()

    def runs_on_dtensors(self, path: str) -> bool:
        """Whether a module or parameter stays on DTensors in static mode."""
        return any(is_inside(path, module) for module in self.eager)

    def lines_of(self, path: str) -> tuple[str, ...]:
        """Returns the lines of the plan that place the parameters of one module."""
        lines = [
            line
            for name, schedule in self.schedules.items()
            if name.rpartition(".")[0] == path
            for line in schedule.lines
        ]
        return tuple(dict.fromkeys(lines))


def gradient_placements(sites: Iterable[Site]) -> dict[str, dict[str, Placement]]:
    """Returns the placements of gradients that the plan annotates, by parameter and axis."""
    placements: dict[str, dict[str, Placement]] = {}
    for site in sites:
        for step in site.steps:
            if site.hook_point is HookPoint.GRAD and step.kind is OpKind.ANNOTATE:
                name = f"{site.path}.{step.tensor}" if site.path else step.tensor
                moves = step.moves.items()
                placements.setdefault(name, {}).update({axis: move.dst for axis, move in moves})
    return placements
