"""Which modules of a model a stage begins with.

Note [units]
    A model is a chain of *units*, modules called one after another: what embeds the inputs, the
    repeated layers, what makes the outputs. A *split point* is the name of the unit that a further
    stage begins with; a stage is the units from its own split point up to the next one's. Modules
    that are no units and hold no parameters, such as rotary embeddings, are on every stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from integration.errors import UsageError


@dataclass(frozen=True)
class Chain:
    """The names of a model's units, in the order of their calls.

    Attributes:
        inputs: units before the layers; parameters outside of all units are the first stage's too.
        layers: the repeated ones.
        outputs: units behind the layers.
    """

    inputs: tuple[str, ...]
    layers: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def units(self) -> tuple[str, ...]:
        """All names in order."""
        return self.inputs + self.layers + self.outputs


def even_split(chain: Chain, stages: int, *, ends: int = 1) -> tuple[str, ...]:
    """Return the split points that give every stage about as many layers.

    With a stage or two more than layers, the inputs have one of their own, then the outputs too.

    Args:
        chain: of the model.
        stages: how many, 1 or more.
        ends: how many layers the inputs weigh, and the outputs, each.

    Raises:
        UsageError: there are more stages than that.
    """
    layers = len(chain.layers)
    if layers < stages <= layers + 2:
        return (*chain.layers, chain.outputs[0])[: stages - 1]
    if layers < stages:
        raise UsageError(
            f"{layers} layers are too few for {stages} pipeline stages; use fewer stages, or give"
            " --pp-split-points, among which the modules around the layers may be"
        )
    weight = layers + 2 * ends
    starts: list[int] = [0]
    for stage in range(1, stages):
        even = (2 * stage * weight + stages) // (2 * stages) - ends
        starts.append(min(max(even, starts[-1] + 1), layers - (stages - stage)))
    return tuple(chain.layers[start] for start in starts[1:])


def check_split(chain: Chain, points: Sequence[str]) -> None:
    """Refuse split points that are no units, or out of order.

    Raises:
        UsageError: naming the first that does not do.
    """
    units = chain.units
    at = 0
    for point in points:
        if point not in units:
            raise UsageError(
                f"split point {point!r} is no module that a stage can begin with; those are"
                f" {units[1]} to {units[-1]}"
            )
        if units.index(point) <= at:
            before = "the first stage" if at == 0 else repr(units[at])
            raise UsageError(
                f"split point {point!r} does not come behind {before}; give --pp-split-points in"
                " the order of the model's calls"
            )
        at = units.index(point)


def stage_units(chain: Chain, points: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the units of each stage."""
    units = chain.units
    bounds = [0, *map(units.index, points), len(units)]
    return tuple(units[start:end] for start, end in pairwise(bounds))


def require_untied(model: nn.Module, chain: Chain) -> None:
    """Refuse a model of which two units share a parameter.

    Raises:
        UsageError: naming both.
    """
    owners: dict[int, str] = {}
    for unit in chain.units:
        for name, parameter in model.get_submodule(unit).named_parameters():
            owner = owners.setdefault(id(parameter), f"{unit}.{name}")
            if not owner.startswith(f"{unit}."):
                raise UsageError(
                    f"{unit}.{name} is tied to {owner}, and a pipeline may keep the two on"
                    " different ranks; use a model with tie_word_embeddings = False, or --pp-degree"
                    " 1"
                )
