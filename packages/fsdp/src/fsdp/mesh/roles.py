"""What a group's parameters, gradients and optimizer state are placed by, each for itself.

Note: the strategies of data parallelism, as the placements of the three roles on the axes of
fully_shard's mesh; docs/packages/fsdp/placements.md has their memory and bytes.

    ======== ========= ======== ========= ===============================================
    strategy parameter gradient optimizer what a step sends
    ======== ========= ======== ========= ===============================================
    ddp      R         R        R         all-reduce
    zero1    R         R        S         reduce-scatter, all-gather
    zero2    R         S        S         reduce-scatter, all-gather
    zero3    S         S        S         reduce-scatter, two all-gathers
    hsdp     R S       R S      R S       as zero3 over S, all-reduce of shards over R
    hfsdp    R S       R S      S S       as hsdp, with a reduce-scatter and an all-gather over R
    ======== ========= ======== ========= ===============================================

R is ``Replicate()`` and S is ``Shard(0)``; of two, the first is that of the replicate axis.

Source: ZeRO, arXiv 1910.02054; Megatron-FSDP's HFSDP, whose outer axis shards the optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp._compat import check_ordered_groups

__all__ = ["STRATEGIES", "Roles", "checked_roles", "named_roles"]


@dataclass(frozen=True)
class Roles:
    """The placements of parameters, gradients and optimizer state on a mesh of data parallelism.

    Each is one placement for each axis of the mesh, ``Replicate()`` or ``Shard(0)``; one alone
    stands for one axis. `STRATEGIES` has those that exist, by name.

    Attributes:
        parameter: between steps. A parameter that is replicated there is gathered once after each
            step of the optimizer, in the next forward, instead of in each forward and backward.
        gradient: of those that wait for later microbatches
            (``set_requires_gradient_sync(False)``). On an axis that shards they are reduced in each
            backward, and on one that replicates once, in the last.
        optimizer: what optimizers, clipping and checkpoints see, as DTensors.
    """

    parameter: Placement | Sequence[Placement]
    gradient: Placement | Sequence[Placement]
    optimizer: Placement | Sequence[Placement]

    def __post_init__(self) -> None:
        """Makes each role a tuple."""
        for role in ("parameter", "gradient", "optimizer"):
            object.__setattr__(self, role, _tuple(getattr(self, role)))

    @property
    def ndim(self) -> int:
        """The number of the mesh's axes."""
        return len(_tuple(self.parameter))

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters stay unsharded between steps."""
        return all(isinstance(one, Replicate) for one in _tuple(self.parameter))

    @property
    def reduces_each_backward(self) -> bool:
        """Whether the axis that shards reduces gradients that wait for later microbatches."""
        return isinstance(_tuple(self.gradient)[-1], Shard)

    @property
    def shards_optimizer(self) -> bool:
        """Whether a rank has a part of the optimizer state."""
        return isinstance(_tuple(self.optimizer)[-1], Shard)

    @property
    def shards_over_replicas(self) -> bool:
        """Whether replicas have different parts of the optimizer state."""
        first, *others = _tuple(self.optimizer)
        return bool(others) and isinstance(first, Shard)

    def __str__(self) -> str:
        """Returns the roles as the table of strategies has them."""
        return ", ".join(
            f"{role}={' '.join(map(_letter, _tuple(getattr(self, role))))}"
            for role in ("parameter", "gradient", "optimizer")
        )


def _tuple(placements: Placement | Sequence[Placement]) -> tuple[Placement, ...]:
    return (placements,) if isinstance(placements, Placement) else tuple(placements)


def _letter(placement: object) -> str:
    if isinstance(placement, Replicate):
        return "R"
    return "S" if placement == Shard(0) else repr(placement)


_R, _S = Replicate(), Shard(0)

#: By name, in the order of the memory that they need; the last two are of a mesh of two axes.
STRATEGIES = MappingProxyType(
    {
        "ddp": Roles(_R, _R, _R),
        "zero1": Roles(_R, _R, _S),
        "zero2": Roles(_R, _S, _S),
        "zero3": Roles(_S, _S, _S),
        "hsdp": Roles((_R, _S), (_R, _S), (_R, _S)),
        "hfsdp": Roles((_R, _S), (_R, _S), (_S, _S)),
    }
)


def named_roles(name: str, ndim: int) -> Roles:
    """Returns the roles of a strategy, before there is a mesh.

    Args:
        name: of the strategy.
        ndim: axes of the mesh.

    Raises:
        ValueError: there is no such strategy of so many axes.
    """
    possible = _strategies(ndim)
    if name not in possible:
        raise ValueError(
            f"fully_shard: expected placements to be one of {', '.join(map(repr, possible))} on "
            f"{ndim} axes, got {name!r}"
        )
    return possible[name]


def _strategies(ndim: int) -> dict[str, Roles]:
    return {name: one for name, one in STRATEGIES.items() if one.ndim == ndim}


def checked_roles(placements: object, mesh: DeviceMesh) -> Roles:
    """Returns the roles that ``fully_shard(placements=)`` names.

    Args:
        placements: roles, or the name of a strategy.
        mesh: of parameters.

    Raises:
        ValueError: it is neither; it is none of the strategies of the mesh's axes; this torch
            cannot shard over replicas.
    """
    roles = STRATEGIES.get(placements) if isinstance(placements, str) else placements
    possible = _strategies(mesh.ndim)
    if not isinstance(roles, Roles) or roles not in possible.values():
        shown = "; ".join(f"{name!r} ({one})" for name, one in possible.items())
        got = f"Roles({roles})" if isinstance(roles, Roles) else repr(placements)
        if isinstance(roles, Roles) and isinstance(placements, str):
            got = f"{placements!r} ({roles})"
        raise ValueError(
            f"fully_shard: placements: expected one of {shown}, of Replicate() (R) and Shard(0) "
            f"(S) on the {mesh.ndim} axes {tuple(mesh.shape)} of the mesh, got {got}; choose one, "
            f"or flatten or divide the mesh's axes"
        )
    if roles.shards_over_replicas:
        check_ordered_groups()
    return roles
