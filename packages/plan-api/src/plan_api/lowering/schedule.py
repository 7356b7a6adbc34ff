"""How each parameter is placed, and when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from plan_api.lowering.ir import Act, Moment, Op, short
from plan_api.spec.axes import axis_names

__all__ = ["Schedule", "schedules"]

_Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Schedule:
    """The placements of one parameter or buffer; see `Phase`.

    Attributes:
        rest: of the DTensor that the model, the optimizer and checkpoints have.
        run: while its module runs.
        keeps: whether what forward and backward use stays until the optimizer has changed it.
        waits: whether its gradients stay whole until backward is through.
        entries: of the plan, which it comes from.
        lines: where these were written.
    """

    rest: _Placements
    run: _Placements
    keeps: bool = False
    waits: bool = False
    entries: tuple[int, ...] = ()
    lines: tuple[str, ...] = field(default=(), compare=False)

    @property
    def moves(self) -> bool:
        """Whether it is used otherwise than it rests."""
        return self.rest != self.run

    def at(self, moment: Moment) -> _Placements:
        """The placements in a phase: of GRAD those of a gradient that does not wait."""
        whole = moment is Moment.RUN or (moment is Moment.INIT and self.keeps)
        return self.run if whole else self.rest


def schedules(
    tensors: Mapping[str, torch.Tensor], ops: Iterable[Op], mesh: DeviceMesh
) -> dict[str, Schedule]:
    """The schedule of every tensor of which a plan says something, by its first name.

    Args:
        tensors: parameters and buffers, by name.
        ops: of the plan, on parameters and buffers.
        mesh: the plan's.

    Raises:
        ValueError: a buffer has phases, or a gradient is to be placed as no phase needs it.
    """
    said: dict[str, dict[Moment, dict[int, Placement]]] = {}
    entries: dict[str, dict[int, str]] = {}
    axes = axis_names(mesh)
    for op in ops:
        if op.act is Act.SHARD:
            name = f"{op.path}.{op.tensor}" if op.path else op.tensor
            said.setdefault(name, {}).setdefault(op.moment, {})[axes.index(op.axis)] = op.dst
            entries.setdefault(name, {})[op.entry] = op.line
    return {
        name: replace(
            _schedule(name, tensors[name], when, mesh),
            entries=tuple(entries[name]),
            lines=tuple(dict.fromkeys(line for line in entries[name].values() if line)),
        )
        for name, when in said.items()
    }


def _schedule(
    name: str,
    tensor: torch.Tensor,
    when: Mapping[Moment, Mapping[int, Placement]],
    mesh: DeviceMesh,
) -> Schedule:
    if not isinstance(tensor, nn.Parameter) and set(when) != {Moment.INIT}:
        raise ValueError(f"{name} is a buffer: it is placed once, with phase INIT")

    def placed(moment: Moment, otherwise: _Placements) -> _Placements:
        changed = when.get(moment, {})
        return tuple(changed.get(axis, was) for axis, was in enumerate(otherwise))

    init = placed(Moment.INIT, (Replicate(),) * mesh.ndim)
    rest, run = placed(Moment.OPTIM, init), placed(Moment.RUN, init)
    gradient = placed(Moment.GRAD, rest if Moment.OPTIM not in when else run)
    if gradient not in (rest, run):
        raise ValueError(
            f"the gradient of {name} is to be {_text(gradient)}: say {_text(rest)}, as the "
            f"optimizer needs it, or {_text(run)}, as backward makes it"
        )
    waits = gradient != rest
    return Schedule(_as_cut_from(run, rest, mesh), run, keeps=init == run != rest, waits=waits)


def _as_cut_from(run: _Placements, rest: _Placements, mesh: DeviceMesh) -> _Placements:
    """Shards at rest that are pieces of those that run.

    Torch cuts a dim along the axes from left to right. Where an axis on the right has cut the same
    dim and stays so, a piece of its shard is torch's _StridedShard, as in FSDP2 beside tensor
    parallelism; gathering it then is communication along the one axis alone.
    """
    pieces = list(rest)
    for axis, placement in enumerate(rest):
        if type(placement) is not Shard or run[axis] == placement:
            continue
        cut_before = [
            mesh.size(other)
            for other in range(axis + 1, mesh.ndim)
            if rest[other] == placement == run[other]
        ]
        if cut_before:
            pieces[axis] = _StridedShard(placement.dim, split_factor=math.prod(cut_before))
    return tuple(pieces)


def _text(placements: _Placements) -> str:
    return f"({', '.join(map(short, placements))})"
