"""A parameter of a group, which its modules find sharded or whole.

Note: the words of this package, beside those of `dbuffer`.
    group: the parameters of one call of fully_shard that have one dtype and are all trained or all
        frozen; one layout, gathered and reduced as one.
    sharded parameter: a DTensor placed by RaggedShard, in the group's SHARD buffer; it is what
        optimizers, clipping and checkpoints see, and what modules have between steps.
    unsharded parameter: an ordinary tensor of the compute dtype in the group's FULL buffer; what
        forward and backward see. The object stays the same; its memory comes and goes.
    state: what is known of the modules of one call, their groups among it; the root's runs first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp.inner import Placed
from fsdp.optimizers import mark_stale
from fsdp.policy import Whole
from fsdp.quantized.tiles import Tiles

__all__ = ["ManagedParameter", "Place"]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a module keeps a parameter."""

    module: nn.Module
    key: str

    def get(self) -> nn.Parameter | None:
        """What is there now."""
        return self.module._parameters.get(self.key)

    def put(self, param: nn.Parameter) -> None:
        """Puts another there, through the module's own ``__setattr__`` where it has one."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.key] = param
        else:
            setattr(self.module, self.key, param)


@dataclass(eq=False)
class ManagedParameter:
    """One parameter, tied ones counted once.

    Attributes:
        name: full once the root is known, until then from the module that was sharded.
        original: as it was given; None once it was taken over.
        places: all that hold it.
        block: elements that are never cut.
        mesh: of one axis, or of two for HSDP, that it is sharded over; None where it is only
            planned.
        placed: how it lies if it is a DTensor; None of plain tensors.
        tiles: as which it is quantised to be gathered; None if it is not.
        extension: whether it is a tensor that says itself what is gathered of it.
        whole: how it was asked for, if on one rank.
        sharded: DTensor, of the original dtype, in the SHARD buffer.
        unsharded: of the compute dtype, in the FULL buffer; None before the first gather.
    """

    name: str
    original: nn.Parameter | None
    places: Sequence[Place]
    block: int
    mesh: DeviceMesh | None
    placed: Placed | None = None
    tiles: Tiles | None = None
    extension: bool = False
    whole: Whole | None = None
    sharded: nn.Parameter = field(init=False)
    unsharded: nn.Parameter | None = None

    @property
    def given(self) -> nn.Parameter:
        """The parameter as it was given, which a group takes over."""
        assert self.original is not None, "a group has taken it over"
        return self.original

    def put(self, param: nn.Parameter) -> None:
        """Registers it in all its places."""
        for place in self.places:
            place.put(param)

    def registered(self) -> nn.Parameter | None:
        """What its places hold: of several the one that was put there, if one was."""
        held = [place.get() for place in self.places]
        return next((param for param in held if param is not self.sharded), held[0])

    def is_everywhere(self, param: object) -> bool:
        """Whether all its places hold a parameter."""
        return all(place.get() is param for place in self.places)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what this rank has of the unsharded parameter."""
        return tuple(self.given.shape) if self.placed is None else self.placed.shape

    def local(self) -> torch.Tensor:
        """What this rank has of the parameter as it was given, gathered along our axes."""
        given = self.given.detach()
        if self.placed is None or not isinstance(given, DTensor):
            return given
        return given.redistribute(placements=self.placed.spec.placements).to_local()

    def make_unsharded(self, whole: torch.Tensor) -> None:
        """Makes what modules compute with from a tensor in memory that gathers fill."""
        if self.placed is not None:
            whole = DTensor(whole, self.placed.spec, requires_grad=False)
        self.unsharded = nn.Parameter(whole, requires_grad=self.sharded.requires_grad)
        mark_stale(self.unsharded, self.name)

    def follow(self) -> None:
        """Lets the unsharded parameter be trained or frozen as the sharded one is now."""
        assert self.unsharded is not None
        if self.unsharded.requires_grad != self.sharded.requires_grad:
            self.unsharded.requires_grad_(self.sharded.requires_grad)
