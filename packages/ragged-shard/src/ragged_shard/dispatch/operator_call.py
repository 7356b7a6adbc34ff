"""What a sharding rule takes and returns: an operator call, and a decision about one mesh axis.

Note: a rule decides one mesh axis only. torch decides the others, for the same operator with
Replicate (or Shard, for an interleaved input) on that axis; then the rule's placements are set in
torch's decision. So a rule never repeats what torch knows about tensor parallelism on other axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.geometry.specs import tensor_meta_of


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """A placement for one axis of one tensor."""

    axis: int
    placement: Placement


@dataclass(frozen=True)
class AxisDecision:
    """A rule's decision.

    Attributes:
        inputs: for every tensor of the call, the placement it must have on an axis; None leaves it
            to torch, after a placement of this package is gathered.
        outputs: likewise for the outputs; one entry stands for every output.
        arguments: positional arguments to put in place of the given ones, by index: local sizes
            where the operator was given global ones. A function gets the output's spec.
        as_shard: torch decides for a Shard in place of the InterleavedShard, and may move it to
            another dim: the outputs then state only how the dim is interleaved. Otherwise torch
            decides for a replica, and the outputs of this decision are final.
        elementwise: the operator works element by element, so it needs no strategy of
            torch where all tensors of a shape have the same placements.
    """

    inputs: tuple[AxisPlacement | None, ...]
    outputs: tuple[AxisPlacement | None, ...]
    arguments: Mapping[int, Callable[[DTensorSpec], object] | object] = field(default_factory=dict)
    as_shard: bool = False
    elementwise: bool = False


@dataclass(frozen=True, slots=True)
class TensorOperand:
    """A tensor among an operator's arguments.

    Attributes:
        spec: its mesh, placements, shape, stride and dtype.
        argument: position, or keyword.
        item: index in the list that the argument is, or None.
    """

    spec: DTensorSpec
    argument: int | str
    item: int | None = None

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return tensor_meta_of(self.spec).shape


class OperatorCall:
    """An operator call to propagate: `OpSchema`, seen by rules.

    Attributes:
        schema: torch's form of the same.
        op: the operator.
        args: positional arguments, with specs in place of tensors.
        operands: every tensor, in order: positional arguments, then keywords.
    """

    def __init__(self, schema: OpSchema) -> None:
        self.schema = schema
        self.op: torch._ops.OpOverload = schema.op
        self.args: tuple[object, ...] = schema.args_schema
        named: list[tuple[int | str, object]] = [
            *enumerate(self.args),
            *schema.kwargs_schema.items(),
        ]
        self.operands: tuple[TensorOperand, ...] = tuple(
            operand for name, argument in named for operand in _operands(name, argument)
        )

    @property
    def specs(self) -> tuple[DTensorSpec, ...]:
        """The operands' specs. One spec object may stand for several tensors."""
        return tuple(operand.spec for operand in self.operands)

    @property
    def in_place(self) -> bool:
        """Whether the operator writes to its first argument, and returns it."""
        return self.op._schema.name.endswith("_") and self.op._schema.is_mutable

    @property
    def name(self) -> str:
        """The operator's full name, ``aten.add.Tensor``."""
        return str(self.op)

    def lead_of(self, operand: TensorOperand) -> TensorOperand:
        """The operand of the first argument at the same place in its list."""
        return [lead for lead in self.operands if lead.argument == 0][operand.item or 0]

    def argument(self, name: str, default: object = None) -> object:
        """An argument by its name in the operator's signature, or the default if left out."""
        for index, parameter in enumerate(self.op._schema.arguments):
            if parameter.name == name and index < len(self.args):
                return self.args[index]
        return self.schema.kwargs_schema.get(name, default)

    def position(self, name: str) -> int:
        """The position of an argument of the operator's signature."""
        return [parameter.name for parameter in self.op._schema.arguments].index(name)


def _operands(name: int | str, argument: object) -> Iterator[TensorOperand]:
    if isinstance(argument, DTensorSpec):
        yield TensorOperand(argument, name)
    elif isinstance(argument, list | tuple):
        for item, value in enumerate(argument):
            if isinstance(value, DTensorSpec):
                yield TensorOperand(value, name, item)


AxisRule = Callable[[OperatorCall], AxisDecision | None]
