"""`simulate`: what training a model on a mesh takes, without the mesh."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp.api import PlacementFn
from fsdp.mesh import Roles
from fsdp.simulate.cost import collectives_of, time_of
from fsdp.simulate.fake_world import fake_world
from fsdp.simulate.machine import Constants, MeshLike, parse_mesh_size
from fsdp.simulate.memory import memory_of
from fsdp.simulate.optimizer_state import OptimizerLike, optimizer_bytes, state_bytes_of
from fsdp.simulate.recorder import EventRecorder
from fsdp.simulate.result import Simulation
from fsdp.simulate.simulated_model import (
    AssumedSizes,
    Forward,
    ShardOptions,
    SimulatedModel,
    device_type_of,
    no_garbage_collection,
)
from fsdp.simulate.units import Unit, Units, find_units

__all__ = ["Simulator", "simulate"]


def simulate(
    model: nn.Module,
    *,
    mesh: MeshLike,
    units: Units = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # it is frozen
    reshard_after_forward: bool | int | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    placements: Roles | str | None = None,
    optimizer: OptimizerLike = "adamw",
    forward: Forward | None = None,
    activations: int = 0,
    tokens: int = 0,
    constants: Constants | None = None,
    exchange: bool = False,
) -> Simulation:
    """Predicts memory, padding, communication and time of training on a mesh of any size.

    A copy of the model is sharded by `fully_shard` over a fake world of that size, and does two
    steps on fake tensors, of which the second is recorded. It needs neither processes nor memory
    for the model, which is not changed; torch.distributed may be initialized or not. The
    collectives and temporary tensors of the optimizer, clipping, memory that an allocator or a
    backend caches, and CPU offload are not counted.

    Args:
        model: on meta, or on any device.
        mesh: number of ranks that shard; or the sizes (replicate, shard), or a mapping of axis
            names to these.
        units: the modules that `fully_shard` is called on before the model: a regular expression
            that matches full names, a function of name and module, or a list of names, in which a
            tuple is one call for several modules.
        shard_placement_fn: as for `fully_shard`.
        mp_policy: as for `fully_shard`.
        reshard_after_forward: as for `fully_shard`, the same for each call.
        ignored_params: as for `fully_shard`; these parameters are not counted.
        placements: as for `fully_shard`, the same for each call. Those of two axes, such as
            "hsdp", take a mesh of one replica, too.
        optimizer: "adam", "adamw", "sgd"; bytes per element of a parameter; or a function that
            returns an optimizer of named parameters, such as a class.
        forward: calls the model that it gets on one rank's batch, and returns the loss. Its work
            and activations are counted on fake tensors if the model is on meta; any other model
            really computes.
        activations: without `forward`, the bytes that forward saves for backward.
        tokens: without `forward`, the tokens of a rank's batch: 6 flops per token and parameter.
        constants: constants of the machine; None to predict no time.
        exchange: whether the strategy of buffers is "exchange", the default with gloo, which
            allocates memory for the shards that other ranks send. Each send is simulated, so the
            time of the simulation grows with the number of ranks.

    Raises:
        ValueError: an argument is not valid; the error says what was expected.
    """
    simulator = Simulator(
        model, units=units, shard_placement_fn=shard_placement_fn, mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward, ignored_params=ignored_params,
        placements=placements, optimizer=optimizer, forward=forward, activations=activations,
        tokens=tokens, constants=constants, exchange=exchange,
    )  # fmt: skip
    return simulator.run(mesh)


class Simulator:
    """Simulates one model on several meshes.

    Arguments and errors are those of `simulate`.
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
        placements: Roles | str | None = None,
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
                    f"simulate: expected {name} to be 0 or more, and 0 with forward, from which it "
                    f"is counted, got {value!r}"
                )
        self._model, self._constants, self._forward = model, constants, forward
        self._sizes = AssumedSizes(activations, tokens)
        self._options = ShardOptions(
            reshard_after_forward, shard_placement_fn, mp_policy, ignored_params,
            "exchange" if exchange else "native", placements,
        )  # fmt: skip
        self._units = find_units(model, units, ignored_params)
        self._state_bytes = state_bytes_of(
            optimizer, [(_full_name(unit, one.name), one.param) for unit in self._units
                        for one in unit.found]
        )  # fmt: skip

    def run(self, mesh: MeshLike) -> Simulation:
        """Returns the simulation on a mesh."""
        size, recorder = parse_mesh_size(mesh), EventRecorder()
        world = fake_world(
            size, device_type_of(self._model), with_replicas=self._options.with_replicas
        )
        with no_garbage_collection(), world as fake_mesh, recorder:
            sharded = SimulatedModel(self._units, fake_mesh, self._options, recorder)
            replicas = fake_mesh.get_group(0).group_name if fake_mesh.ndim == 2 else ""
            for _ in range(2):  # the first step allocates buffers, and learns the order of modules
                if self._forward is None:
                    sharded.assumed_step(self._sizes)
                else:
                    sharded.step(self._forward)
        step, groups = recorder.events, sharded.groups
        state = optimizer_bytes(groups, self._state_bytes)
        memory = memory_of(recorder, state, activations=sharded.saved)
        time = None
        if self._constants is not None:
            time = time_of(
                step, size, self._constants, tensors=len(self._state_bytes),
                nbytes=memory.gradients, replicas=replicas,
            )  # fmt: skip
        return Simulation(
            mesh=size,
            groups=len(groups),
            elements=sum(group.layout.total for group in groups),
            padding=sum(group.layout.padding for group in groups),
            memory=memory,
            optimizer_by_rank=tuple(state.tolist()),
            collectives=collectives_of(step),
            time=time,
        )


def _full_name(unit: Unit, name: str) -> str:
    return f"{unit.name}.{name}" if unit.name and len(unit.modules) == 1 else name
