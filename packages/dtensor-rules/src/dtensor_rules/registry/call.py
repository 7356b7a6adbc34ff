"""A call that needs a plan, and what of a plan can be said in its terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpInfo
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from dtensor_rules.plan import Move
from dtensor_rules.redistribution import transform_between


@dataclass(frozen=True, eq=False)
class Call:
    """A call that needs a plan.

    Attributes:
        op: the operator.
        args: its positional arguments, DTensors among them; trailing defaults are left out.
        kwargs: its keyword-only arguments that are no defaults.
    """

    op: torch._ops.OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]

    @cached_property
    def specs(self) -> list[DTensorSpec]:
        """The specs of the DTensors among the positional arguments, lists opened, in order."""
        leaves = pytree.tree_leaves(self.args)
        return [leaf._spec for leaf in leaves if isinstance(leaf, DTensor)]

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Where its DTensors stand: the argument in the schema and the element of a list, or -1.

        Those of `specs` come first, in the same order.
        """
        found = []
        for index, argument in enumerate(self.op._schema.arguments):
            given = index < len(self.args)
            value = self.args[index] if given else self.kwargs.get(argument.name)
            if isinstance(value, DTensor):
                found.append((index, -1))
            elif isinstance(value, (list, tuple)):
                found += [(index, at) for at, one in enumerate(value) if isinstance(one, DTensor)]
        return found

    def redistribute(self, targets: Mapping[int, Sequence[Placement]]) -> list[Move]:
        """The moves by which DTensors get other placements before the operator runs.

        Args:
            targets: by number among `specs`, a placement per mesh axis. A DTensor that has them
                already needs no move.

        Returns:
            moves by torch's redistributions, for `Plan(moves=...)`.

        Raises:
            ValueError: a number that no DTensor of `specs` has; not one placement per mesh axis.
        """
        moves = []
        for number, placements in sorted(targets.items()):
            source = self.numbered("redistribute", number)
            target = DTensorSpec(source.mesh, tuple(placements), tensor_meta=source.tensor_meta)
            check_axes(f"redistribute[{number}]", target)
            if source.placements != target.placements:
                transform = transform_between(source, target)
                moves.append(Move(*self.places[number], transform, target))
        return moves

    def output(
        self,
        placements: Sequence[Placement],
        like: int = 0,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> DTensorSpec:
        """The spec of a result, for `Plan(outputs=[...])`; shape and strides are global.

        Args:
            placements: of the result, one per mesh axis.
            like: the number among `specs` of the DTensor whose shape, strides and dtype it has.
                A gradient may be expanded, with strides of 0, which no result has: name the tensor
                that the forward saved instead.
            shape: if it is another.
            stride: in elements; by default that of `like`, or contiguous if a shape is given.
            dtype: if it is another.

        Raises:
            ValueError: a number that no DTensor of `specs` has; not one placement per mesh axis.
        """
        spec = self.numbered("like", like)
        meta = spec.tensor_meta
        assert meta is not None
        if shape is not None and stride is None:
            stride = torch.empty(tuple(shape), device="meta").stride()
        result = TensorMeta(
            meta.shape if shape is None else torch.Size(shape),
            meta.stride if stride is None else tuple(stride),
            dtype or meta.dtype,
        )
        placed = DTensorSpec(spec.mesh, tuple(placements), tensor_meta=result)
        check_axes("output", placed)
        return placed

    def numbered(self, field: str, number: int) -> DTensorSpec:
        """The DTensor of `specs` with this number, which ``field`` names.

        Raises:
            ValueError: there is none.
        """
        if not 0 <= number < len(self.specs):
            raise ValueError(
                f"{field}={number}: expected the number of one of the call's "
                f"{len(self.specs)} DTensors, counted from 0"
            )
        return self.specs[number]

    @cached_property
    def info(self) -> OpInfo:
        """The call as torch's propagation takes it.

        Raises:
            RuntimeError: a plain tensor that is no scalar is among the arguments.
        """
        return DTensor._op_dispatcher.unwrap_to_op_info(self.op, self.args, self.kwargs)


def check_axes(where: str, spec: DTensorSpec) -> None:
    """Refuses a spec whose placements are not one per axis of its mesh.

    Args:
        where: begins the message.
        spec: any.

    Raises:
        ValueError: there are more or fewer.
    """
    if len(spec.placements) != spec.mesh.ndim:
        raise ValueError(
            f"{where}: {spec.placements} must be one per axis of {tuple(spec.mesh.shape)}"
        )
