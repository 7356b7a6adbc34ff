"""A model as FSDP sees it: groups of named tensors, of which only the shapes matter."""

from dataclasses import dataclass
from math import prod
from typing import Literal

#: "expert": a matrix of a routed expert's feed-forward network, or many stacked in one tensor.
#: "matrix": any other matrix. "other": vectors, and stacked vectors such as the experts' biases.
Kind = Literal["expert", "matrix", "other"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a model: what it is called within its group, its shape, its kind."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "matrix"

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Group:
    """The parameters that one call of ``fully_shard`` puts into one buffer, in its order."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, slots=True)
class Model:
    """A model's groups: one per transformer layer, then ``root`` with what is left."""

    name: str
    groups: tuple[Group, ...]

    @property
    def numel(self) -> int:
        """Elements of all its groups: the number of parameters that is published."""
        return sum(group.numel for group in self.groups)

    def only(self, name: str) -> "Model":
        """The same model with one group alone.

        Raises:
            ValueError: No group has this name.
        """
        found = tuple(group for group in self.groups if group.name == name)
        if not found:
            first, last = self.groups[0].name, self.groups[-1].name
            raise ValueError(
                f"{self.name} has no group {name!r}; "
                f"it has {len(self.groups)}, from {first!r} to {last!r}"
            )
        return Model(self.name, found)
