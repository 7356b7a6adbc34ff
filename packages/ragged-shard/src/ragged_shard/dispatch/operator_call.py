"""The argument and the result of a sharding rule: an operator call, a decision about one axis.

Note: a rule decides one mesh axis only. torch decides the others, for the same operator with
Replicate (or Shard, for an interleaved input) on that axis; then the rule's placements are set in
torch's decision. So rules do not repeat torch's strategies for tensor parallelism on other axes.
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
    """A rule's decision about one mesh axis.

    Attributes:
        inputs: for each tensor of the call, the placement that it must have on the axis; None:
            torch decides, after a placement of this package is gathered.
        outputs: for each output, its placement on the axis; a single entry is for all outputs.
        arguments: positional arguments that replace those of the call, by index, such as local
            sizes for global ones. A function is called with the output's spec.
        as_shard: torch decides as if the InterleavedShard were a Shard, and may move it to another
            dim: the outputs then define only how the dim is interleaved. Otherwise torch decides as
            if it were Replicate, and the outputs of this decision are final.
        elementwise: the operator is elementwise, so it needs no strategy of torch where all tensors
            of a shape have the same placements.
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
        argument: its position or keyword.
        item: its index in an argument that is a list; None for other arguments.
    """

    spec: DTensorSpec
    argument: int | str
    item: int | None = None

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return tensor_meta_of(self.spec).shape


class OperatorCall:
    """An operator call that is propagated, as rules read it.

    Attributes:
        schema: the call as torch's `OpSchema`.
        op: the operator.
        args: the positional arguments, with specs in place of tensors.
        operands: all tensors, in order: positional arguments, then keywords.
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
        """The operands' specs; several tensors may share one spec object."""
        return tuple(operand.spec for operand in self.operands)

    @property
    def in_place(self) -> bool:
        """Whether the operator writes to its first argument and returns it."""
        return self.op._schema.name.endswith("_") and self.op._schema.is_mutable

    @property
    def name(self) -> str:
        """The operator's full name, ``aten.add.Tensor``."""
        return str(self.op)

    def lead_of(self, operand: TensorOperand) -> TensorOperand:
        """Returns the operand of the first argument with the same index in its list."""
        return [lead for lead in self.operands if lead.argument == 0][operand.item or 0]

    def argument(self, name: str, default: object = None) -> object:
        """Returns an argument by its name in the signature; the default if the call omits it."""
        for index, parameter in enumerate(self.op._schema.arguments):
            if parameter.name == name and index < len(self.args):
                return self.args[index]
        return self.schema.kwargs_schema.get(name, default)

    def position(self, name: str) -> int:
        """Returns the position of an argument in the operator's signature."""
        return [parameter.name for parameter in self.op._schema.arguments].index(name)


def _operands(name: int | str, argument: object) -> Iterator[TensorOperand]:
    if isinstance(argument, DTensorSpec):
        yield TensorOperand(argument, name)
    elif isinstance(argument, list | tuple):
        for item, value in enumerate(argument):
            if isinstance(value, DTensorSpec):
                yield TensorOperand(value, name, item)


AxisRule = Callable[[OperatorCall], AxisDecision | None]
