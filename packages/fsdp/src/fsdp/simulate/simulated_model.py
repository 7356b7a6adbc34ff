"""A copy of a model that `fully_shard` has sharded over a fake world, and its training step.

The copy of a model on meta computes on fake tensors. Any other model really computes, as its
operators may depend on data: its unsharded parameters are real copies, which all-gathers do not
fill. Buffers of parameters and gradients are fake in both cases.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dbuffer import Strategy
from fsdp.api import PlacementFn, fully_shard
from fsdp.mesh.granularity import Balance, Whole
from fsdp.mesh.roles import STRATEGIES, Roles
from fsdp.param import ParamLocation
from fsdp.param_group import FSDPParamGroup
from fsdp.simulate.events import ComputeWork
from fsdp.simulate.recorder import EventRecorder, MemoryKind
from fsdp.simulate.units import Unit
from fsdp.state import FSDPState, state_of
from ragged_shard.planner import Layout

__all__ = [
    "AssumedSizes",
    "Forward",
    "PlannedGroup",
    "ShardOptions",
    "SimulatedModel",
    "device_type_of",
    "no_garbage_collection",
]

Forward: TypeAlias = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class ShardOptions:
    """The arguments of `fully_shard`, the same for each call."""

    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFn | None
    mp_policy: MixedPrecisionPolicy
    ignored_params: Collection[nn.Parameter]
    strategy: Strategy
    placements: Roles | str | None = None

    @property
    def with_replicas(self) -> bool:
        """Whether ``placements`` are those of a mesh of two axes, (replicate, shard)."""
        names = self.placements
        roles = STRATEGIES.get(names) if isinstance(names, str) else names
        return isinstance(roles, Roles) and roles.ndim == 2


@dataclass(frozen=True)
class AssumedSizes:
    """The sizes of a step whose forward is not known.

    Forward calls the units in order, and backward in reverse order.

    Attributes:
        activations: bytes that forward saves for backward, divided evenly over all units but the
            model.
        tokens: tokens of a rank in a step: 2 flops per token and parameter in forward, 4 in
            backward.
    """

    activations: int
    tokens: int


@dataclass(frozen=True, eq=False)
class PlannedGroup:
    """A parameter group that `fully_shard` has made.

    Attributes:
        params: the parameters of the original model, in the order of the layout.
        layout: layout of the buffer.
        trained: whether the parameters have gradients.
        is_replicated: whether each rank's optimizer updates all of them, as under DDP.
    """

    params: tuple[nn.Parameter, ...]
    layout: Layout
    trained: bool
    is_replicated: bool


def device_type_of(model: nn.Module) -> str:
    """Returns the type of device that a model's copy computes on; that of meta is the CPU."""
    types = {param.device.type for param in model.parameters()}
    return "cpu" if not types or "meta" in types else types.pop()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Frees reference cycles where `gc.collect` is called only, so that memory does not vary.

    What exists before is not searched for cycles within the context.
    """
    collects, freezes = gc.isenabled(), not gc.get_freeze_count()
    gc.disable()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if collects:
            gc.enable()


class SimulatedModel:
    """The sharded copy of a model; construct and use it within the recorder's context.

    Args:
        units: the units; the first is the model, which is not changed.
        mesh: of a fake world.
        options: arguments of `fully_shard`.
        recorder: records what it does.

    Attributes:
        groups: the parameter groups.
        saved: bytes that forward has saved for backward.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: DeviceMesh,
        options: ShardOptions,
        recorder: EventRecorder,
    ) -> None:
        self._model, self._recorder, self.saved = units[0].modules[0], recorder, 0
        self._computes = all(param.device.type != "meta" for param in self._model.parameters())
        self._device_type = mesh.device_type
        self._originals: dict[nn.Parameter, nn.Parameter] = {}
        self._balances: dict[int, Balance] = {}
        self._copied = self._copy()
        recorder.set_kind(self._originals, MemoryKind.UNCOUNTED)
        recorder.set_kind(self._copied.buffers(), MemoryKind.BUFFERS)
        self._copied.register_forward_hook(lambda *forward: self._note_saved())
        names = {id(module): name for name, module in self._model.named_modules()}
        self._states = self._shard(
            [[names[id(module)] for module in unit.modules] for unit in units], mesh, options
        )
        self._param_groups = [group for state in self._states for group in state.groups]
        self._set_parameter_kind()
        self.groups = []
        modules = {id(module): name for name, module in self._copied.named_modules()}
        for group in self._param_groups:
            originals = [self._original(param.locations[0], modules) for param in group.params]
            roles = group.options.roles
            self.groups.append(
                PlannedGroup(
                    tuple(originals), group.shard.layout, originals[0].requires_grad,
                    is_replicated=roles is not None and not roles.shards_optimizer,
                )
            )  # fmt: skip
            if self._computes:
                self._compute_really(group, originals)

    def step(self, forward: Forward) -> None:
        """Runs forward and backward, without gradients from before.

        Raises:
            ValueError: `forward` does not return a loss.
        """
        with self._recorded_step():
            self._recorder.fake = not self._computes
            loss: Any = forward(self._copied)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(
                    f"simulate: expected forward to return the loss, a tensor of one element that "
                    f"requires grad, got {type(loss).__name__}"
                )
            loss.backward()

    def assumed_step(self, sizes: AssumedSizes) -> None:
        """Runs a step of which only sizes are known, without gradients from before."""
        with self._recorded_step():
            self._recorder.counts_operators = False
            self._run_assumed(sizes)

    def _run_assumed(self, sizes: AssumedSizes) -> None:
        root, inner = self._states[0], self._states[1:]
        unit = _AssumedUnit(self._recorder, sizes.tokens, sizes.activations // max(len(inner), 1))
        x = torch.empty(0, requires_grad=True)
        (x,), _ = root.pre_forward(root.modules[0], (x,), {})
        # The model's own parameters compute last in forward, and last in backward.
        own = replace(unit, computes_forward=False, activations=0 if inner else unit.activations)
        x = own.run(x, root)
        for state in inner:
            (x,), _ = state.pre_forward(state.modules[0], (x,), {})
            x = state.post_forward(state.modules[0], (x,), unit.run(x, state))
        unit.add_work(2, unsharded_params(root))
        self._note_saved()
        x = root.post_forward(root.modules[0], (x,), x.view_as(x))
        x.sum().backward()

    @contextmanager
    def _recorded_step(self) -> Iterator[None]:
        """Records a step without gradients from before."""
        for param in self._copied.parameters():
            param.grad = None
        gc.collect()  # reference cycles of the step before have memory
        self._recorder.start_step()
        yield
        self._recorder.finish_step()
        self._set_parameter_kind()  # of what the first forward has gathered, and stays

    def _set_parameter_kind(self) -> None:
        for group in self._param_groups:
            self._recorder.set_kind(group.tensors_between_steps(), MemoryKind.PARAMETERS)

    def _note_saved(self) -> None:
        self.saved = self._recorder.allocated(MemoryKind.ACTIVATIONS)

    def _copy(self) -> nn.Module:
        """Returns a copy with fake parameters, and fake buffers where the model is on meta."""
        memo: dict[int, Any] = {}
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            is_param = isinstance(tensor, nn.Parameter)
            if self._computes and not is_param:
                memo[id(tensor)] = tensor.detach().clone()
                continue
            with self._recorder.fake_mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device_type
                )
            if isinstance(tensor, nn.Parameter):
                param = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                self._originals[param] = tensor
                memo[id(tensor)] = param
            else:
                memo[id(tensor)] = fake
        return copy.deepcopy(self._model, memo)

    def _shard(
        self, units: Sequence[Sequence[str]], mesh: DeviceMesh, options: ShardOptions
    ) -> list[FSDPState]:
        """Shards the copy, and returns the states of the units."""
        modules = [[self._copied.get_submodule(name) for name in names] for names in units]
        ignored = {id(param) for param in options.ignored_params}
        for of_unit in reversed(modules):
            fully_shard(
                of_unit,
                mesh=mesh,
                reshard_after_forward=options.reshard_after_forward,
                shard_placement_fn=self._placement_fn(options.shard_placement_fn),
                mp_policy=options.mp_policy,
                ignored_params={
                    param for param, own in self._originals.items() if id(own) in ignored
                },
                strategy=options.strategy,
                placements=options.placements,
            )
        states = [state_of(of_unit[0]) for of_unit in modules]
        return [state for state in states if state is not None]

    def _placement_fn(self, chosen: PlacementFn | None) -> PlacementFn | None:
        """Returns a function of the copied parameters that calls the user's with the originals."""
        if chosen is None:
            return None

        def place(param: nn.Parameter) -> Any:
            granularity: Any = chosen(self._originals[param])
            if hasattr(granularity, "mesh_info"):
                raise ValueError(
                    f"simulate: expected shard_placement_fn to return a granularity for a "
                    f"parameter of {tuple(param.shape)}, got a result with a mesh of its own"
                )
            if isinstance(granularity, Whole) and granularity.balance is not None:
                # A balance that the user gave is counted for this plan alone.
                own = self._balances.setdefault(id(granularity.balance), Balance())
                granularity = replace(granularity, balance=own)
            return granularity

        return place

    def _original(self, location: ParamLocation, modules: Mapping[int, str]) -> nn.Parameter:
        """Returns the parameter of the original model at a place of the copy."""
        module = self._model.get_submodule(modules[id(location.module)])
        original = module._parameters[location.name]
        assert original is not None, "its copy has a parameter there"
        return original

    def _compute_really(self, group: FSDPParamGroup, originals: Sequence[nn.Parameter]) -> None:
        """Makes the unsharded parameters of a group real copies of the original ones."""
        self._recorder.fake = False
        for param, original in zip(group.params, originals, strict=True):
            data = original.detach().to(group.dtypes.compute, copy=True)
            self._recorder.set_kind([data], MemoryKind.UNCOUNTED)
            param.unsharded_param = nn.Parameter(data, requires_grad=original.requires_grad)
        self._recorder.fake = True


@dataclass(frozen=True)
class _AssumedUnit:
    """The compute and memory of a unit whose forward is not known.

    Attributes:
        recorder: records them.
        tokens: tokens of a rank.
        activations: bytes that forward saves for backward.
        computes_forward: whether the work of forward is recorded, too.
    """

    recorder: EventRecorder
    tokens: int
    activations: int
    computes_forward: bool = True

    def run(self, x: torch.Tensor, state: FSDPState) -> torch.Tensor:
        """Returns `x` after forward; its backward makes gradients of the unit's parameters."""
        y: torch.Tensor = _AssumedCompute.apply(self, x, *unsharded_params(state))  # type: ignore[no-untyped-call]
        return y

    def add_work(self, factor: int, params: Sequence[torch.Tensor]) -> None:
        """Records `factor` flops per token and element of parameters."""
        elements = sum(param.numel() for param in params)
        self.recorder.add_work(ComputeWork(factor * self.tokens * elements))


class _AssumedCompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: _AssumedUnit, x: torch.Tensor, *params: torch.Tensor) -> Any:
        ctx.unit, ctx.params = unit, params
        if unit.computes_forward:
            unit.add_work(2, params)
        ctx.saved = torch.empty((unit.activations,), dtype=torch.uint8)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.unit.add_work(4, ctx.params)
        grads = [torch.empty_like(param) if param.requires_grad else None for param in ctx.params]
        ctx.saved = None
        return None, grad, *grads


def unsharded_params(state: FSDPState) -> list[torch.Tensor]:
    """Returns the unsharded parameters of a state, which has gathered them."""
    params = [param.unsharded_param for group in state.groups for param in group.params]
    return [param for param in params if param is not None]
