"""Splits a model into the parts of pipeline stages at split points.

Note [units]
    A model is a chain of *units*, modules that are called one after another: embeddings, repeated
    layers, norm and head. A *split point* is the name of the first unit of each stage but the
    first; a stage is the units from its split point up to the next one. Modules that are not units
    and have no parameters, such as rotary embeddings, are on every stage.

The part of a stage has the modules and names of the model, without the units of other stages.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from integration.errors import UsageError


@dataclass(frozen=True)
class Chain:
    """The names of a model's units, in the order of their calls.

    Attributes:
        inputs: units before the layers; parameters outside of all units are on the first stage.
        layers: repeated layers.
        outputs: units after the layers.
        loss: modules without parameters that compute the loss; they are with the last unit.
    """

    inputs: tuple[str, ...]
    layers: tuple[str, ...]
    outputs: tuple[str, ...]
    loss: tuple[str, ...] = ()

    @property
    def units(self) -> tuple[str, ...]:
        """All names in order."""
        return self.inputs + self.layers + self.outputs

    def absent(self, present: Collection[str]) -> frozenset[str]:
        """Returns the units of other stages, and what belongs to them."""
        absent = frozenset(self.units) - frozenset(present)
        return absent if self.units[-1] in present else absent.union(self.loss)


def even_split(chain: Chain, stages: int, *, ends: int = 1) -> tuple[str, ...]:
    """Returns the split points of stages with about equal numbers of layers.

    With one or two stages more than layers, the inputs, and then the outputs, are stages too.

    Args:
        chain: units of the model.
        stages: number of stages, at least 1.
        ends: weight of the inputs, and of the outputs, in layers.

    Raises:
        UsageError: there are too many stages.
    """
    layers = len(chain.layers)
    if layers < stages <= layers + 2:
        return (*chain.layers, chain.outputs[0])[: stages - 1]
    if layers < stages:
        raise UsageError(
            f"pipeline: expected at most {layers + 2} stages for {layers} layers, got {stages};"
            " use fewer stages, or give --pp-split-points, which may also name the modules around"
            " the layers"
        )
    weight = layers + 2 * ends
    starts: list[int] = [0]
    for stage in range(1, stages):
        even = (2 * stage * weight + stages) // (2 * stages) - ends
        starts.append(min(max(even, starts[-1] + 1), layers - (stages - stage)))
    return tuple(chain.layers[start] for start in starts[1:])


def check_split(chain: Chain, points: Sequence[str]) -> None:
    """Refuses split points that are not units, or out of order.

    Raises:
        UsageError: names the first invalid one.
    """
    units = chain.units
    at = 0
    for point in points:
        if point not in units or point in chain.inputs[1:]:
            first = (*chain.layers, *chain.outputs)[0]
            raise UsageError(
                f"--pp-split-points: expected names of modules from {first} to {units[-1]}, got"
                f" {point!r}; give one that a stage can begin with"
            )
        if units.index(point) <= at:
            before = "the first stage" if at == 0 else repr(units[at])
            raise UsageError(
                f"--pp-split-points: expected the order of the model's calls, got {point!r} after"
                f" {before}; sort them"
            )
        at = units.index(point)


def stage_units(chain: Chain, points: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Returns the units of each stage."""
    units = chain.units
    bounds = [0, *map(units.index, points), len(units)]
    return tuple(units[start:end] for start, end in pairwise(bounds))


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that two units share.

    Attributes:
        name: its name in the first of the units, which optimizers and checkpoints use.
        unit: the first unit.
        other_name: its name in the other unit.
        other_unit: the other unit.
    """

    name: str
    unit: str
    other_name: str
    other_unit: str


def tied_parameters(model: nn.Module, chain: Chain) -> list[TiedParameter]:
    """Returns the parameters that two units of a model share, such as those of tied embeddings.

    Raises:
        UsageError: more than two units share a parameter.
    """
    owners: dict[int, tuple[str, str]] = {}
    tied: dict[int, TiedParameter] = {}
    for unit in chain.units:
        for own, parameter in model.get_submodule(unit).named_parameters():
            name = f"{unit}.{own}"
            first, first_unit = owners.setdefault(id(parameter), (name, unit))
            if first_unit == unit:
                continue
            if id(parameter) in tied:
                raise UsageError(
                    f"pipeline: expected a parameter of at most two modules, got {name}, which is"
                    f" tied to {first} and {tied[id(parameter)].other_name}; use --pp-degree 1"
                )
            tied[id(parameter)] = TiedParameter(first, first_unit, name, unit)
    return list(tied.values())


class PassThrough:
    """Takes the place of a unit of another stage, and returns the unit's first argument.

    The model's own forward thus runs on any part of it, and positions, rotary embeddings and causal
    masks are computed on every stage from the shapes. It is no module: a part has no modules but
    its own.
    """

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns ``hidden_states``."""
        return hidden_states


def has_unit(module: nn.Module, name: str) -> bool:
    """Returns whether a child of a part's module is a unit of the part."""
    return not isinstance(getattr(module, name), PassThrough)


def model_part(model: nn.Module, present: Collection[str], chain: Chain) -> nn.Module:
    """Returns a part of a model, which shares its units with the model.

    Parameters have the same names as in ``model`` and are the same objects. Modules that are no
    units, or contain other stages' units, are copied shallowly, with their hooks, so that wrapping
    or hooking the part does not change ``model`` or other parts.

    Args:
        model: the full model, which is not changed.
        present: names of the part's units; the part with the model's first unit also has the
            parameters outside of all units.
        chain: the units of the model.
    """
    names = [name for name, _ in model.named_modules() if name in chain.units]
    return _part(
        model, "", frozenset(present), chain.absent(present),
        has_root_parameters=names[0] in present,
    )  # fmt: skip


def _part(
    module: nn.Module,
    name: str,
    present: frozenset[str],
    absent: frozenset[str],
    *,
    has_root_parameters: bool,
) -> nn.Module:
    if name in present:
        return module
    below = f"{name}." if name else ""
    copy = _shallow_copy(module)
    if not has_root_parameters:
        copy._parameters = dict.fromkeys(module._parameters)
    for child, submodule in module.named_children():
        if below + child in absent:
            del copy._modules[child]
            object.__setattr__(copy, child, PassThrough())
        else:
            copy._modules[child] = _part(
                submodule, below + child, present, absent, has_root_parameters=has_root_parameters
            )
    return copy


def adopt_tensors(model: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Gives a model the parameters and buffers that its parts have now, in modules they copied."""
    for part in parts:
        for name, module in part.named_modules():
            own = model.get_submodule(name)
            for before, now in (
                (own._parameters, module._parameters),
                (own._buffers, module._buffers),
            ):
                before.update({key: value for key, value in now.items() if value is not None})


def _shallow_copy(module: nn.Module) -> nn.Module:
    copy: nn.Module = type(module).__new__(type(module))
    for name, value in vars(module).items():
        # Hooks, parameters, buffers and submodules are in dictionaries, which are copied.
        own = type(value)(value) if isinstance(value, (dict, OrderedDict)) else value
        object.__setattr__(copy, name, own)
    return copy
