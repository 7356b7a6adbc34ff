"""`simulate`: what training a model on a mesh would take, without the mesh."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp.api import PlacementFn
from fsdp.meshes import checked_reshard
from fsdp.simulate.constants import Constants
from fsdp.simulate.cost import Collective, StepTime, collectives_of, time_of
from fsdp.simulate.memory import Memory, memory_of, optimizer_bytes
from fsdp.simulate.mesh import MeshLike, MeshSize, mesh_size
from fsdp.simulate.optimizer import Kept, OptimizerLike, kept_by
from fsdp.simulate.schedule import Reshard, events
from fsdp.simulate.units import Unit, Units, plan_units, units_of
from fsdp.simulate.work import Forward, Mark, Moment, assumed, traced

__all__ = ["Job", "Simulation", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """What a model takes on a mesh.

    Attributes:
        mesh: sizes of its axes.
        groups: buffers that the parameters are planned in.
        elements: of all parameters.
        padding: elements of the buffers that belong to no parameter.
        memory: of the rank that has most.
        optimizer_by_rank: bytes of state of each rank that shards.
        collectives: of a step.
        time: of a step; None without constants.
    """

    mesh: MeshSize
    groups: int
    elements: int
    padding: int
    memory: Memory
    optimizer_by_rank: tuple[int, ...] = field(repr=False)
    collectives: tuple[Collective, ...]
    time: StepTime | None

    @property
    def padding_ratio(self) -> float:
        """Padding over the parameters' elements."""
        return self.padding / self.elements if self.elements else 0.0

    def table(self) -> str:
        """All of it, for a terminal."""
        from fsdp.simulate.report import table

        return table(self)

    def picture(self, path: str | Path) -> None:
        """Writes an SVG of memory by kind, and of the step's time where that is known."""
        from fsdp.simulate.picture import draw

        Path(path).write_text(draw([self]))


def simulate(
    model: nn.Module,
    *,
    mesh: MeshLike,
    units: Units = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # it is frozen
    reshard_after_forward: bool | int | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    optimizer: OptimizerLike = "adamw",
    forward: Forward | None = None,
    activations: int = 0,
    tokens: int = 0,
    constants: Constants | None = None,
    exchange: bool = False,
) -> Simulation:
    """What training a model takes on a mesh of any size: memory, padding, bytes, time.

    It plans by the code of `fully_shard`, and needs neither processes nor the model's memory. The
    model stays as it is.

    Args:
        model: on meta, or anywhere.
        mesh: ranks that shard; or sizes of (replicate, shard), or these by name.
        units: which modules `fully_shard` is called on before the model: a regular expression of
            whole names, a function of name and module, or a list of names, in which a tuple is
            one call for several.
        shard_placement_fn: as of `fully_shard`.
        mp_policy: as of `fully_shard`.
        reshard_after_forward: as of `fully_shard`, given to each call.
        ignored_params: as of `fully_shard`; they count nowhere.
        optimizer: "adam", "adamw", "sgd"; bytes for each element of a parameter; or a function
            that makes an optimizer of named parameters, such as a class.
        forward: calls the model that it is given on one rank's batch, and returns the loss. Its
            work and activations are counted in one run, on fake tensors where the model is on meta.
        activations: without forward: bytes that it leaves for backward.
        tokens: without forward: of a rank's batch, 6 flops for each and a parameter.
        constants: of the machine; None for no time.
        exchange: whether the buffers' strategy is "exchange", as it is by default over gloo, and
            so takes memory for what other ranks send.

    Raises:
        ValueError: what was given is wrong; it says what is wanted.

    The optimizer's own collectives and temporary tensors do not count, nor do clipping, memory
    that an allocator or a backend keeps, and CPU offload.
    """
    job = Job(
        model, units=units, shard_placement_fn=shard_placement_fn, mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward, ignored_params=ignored_params,
        optimizer=optimizer, forward=forward, activations=activations, tokens=tokens,
        constants=constants, exchange=exchange,
    )  # fmt: skip
    return job.on(mesh)


class Job:
    """A model and how it is trained: what does not depend on the mesh is found once.

    For the arguments and errors see `simulate`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        units: Units = None,
        shard_placement_fn: PlacementFn | None = None,
        mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # it is frozen
        reshard_after_forward: bool | int | None = None,
        ignored_params: Collection[nn.Parameter] = (),
        optimizer: OptimizerLike = "adamw",
        forward: Forward | None = None,
        activations: int = 0,
        tokens: int = 0,
        constants: Constants | None = None,
        exchange: bool = False,
    ) -> None:
        for name, value in (("activations", activations), ("tokens", tokens)):
            if value < 0 or (value and forward is not None):
                raise ValueError(
                    f"simulate: {name}={value!r}; wants 0 or more, and nothing beside forward, "
                    f"which tells it"
                )
        self._model, self._policy, self._place = model, mp_policy, shard_placement_fn
        self._reshard, self._constants, self._exchange = reshard_after_forward, constants, exchange
        self._units = units_of(model, units, ignored_params)
        self._kept: dict[nn.Parameter, Kept] = kept_by(
            optimizer, [(_full_name(unit, one.name), one.param) for unit in self._units
                        for one in unit.found]
        )  # fmt: skip
        self._marks: list[Mark] = (
            assumed(self._units, activations, tokens)
            if forward is None
            else traced(self._units, forward, mp_policy)
        )

        self._left = next(  # when the model's forward has ended
            mark.before.held
            for mark in self._marks
            if mark.moment is Moment.LEAVE and not mark.unit
        )

    def on(self, mesh: MeshLike) -> Simulation:
        """What it takes on a mesh."""
        sizes = mesh_size(mesh)
        reshard, near = checked_reshard(self._reshard, sizes.shard)
        groups = plan_units(self._units, sizes.shard, self._place, self._policy)
        model_too = reshard and self._reshard is not None
        step = list(events(self._marks, groups, Reshard(reshard, model_too, near)))
        state = optimizer_bytes(groups, self._kept, sizes.shard)
        memory = memory_of(
            self._model, groups, step, sizes, state, activations=self._left,
            exchange=self._exchange,
        )  # fmt: skip
        time = None
        if self._constants is not None:
            time = time_of(
                step, sizes, self._constants, tensors=len(self._kept), nbytes=memory.gradients
            )
        return Simulation(
            sizes, len(groups), sum(group.layout.total for group in groups),
            sum(group.layout.padding for group in groups), memory, tuple(state.tolist()),
            collectives_of(step, sizes), time,
        )  # fmt: skip


def _full_name(unit: Unit, name: str) -> str:
    return f"{unit.name}.{name}" if unit.name and len(unit.modules) == 1 else name
