"""The parameters that a reducer is given, and the ranks that have them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from fused_comm.agree import check_agreement
from fused_comm.axes import FlatGroup, group_of_ranks
from fused_comm.gradient import Gradient
from fused_comm.reduction import local_of

__all__ = ["agreed_group", "gradients_of"]


def gradients_of(
    params: Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    accumulate_dtype: torch.dtype | None,
) -> list[Gradient]:
    """A gradient for each parameter; of tied ones the first.

    Raises:
        ValueError: there are none.
    """
    found: list[Gradient] = []
    seen: set[int] = set()
    for number, item in enumerate(params):
        name, param = item if isinstance(item, tuple) else (f"parameter {number}", item)
        if id(param) in seen:
            continue
        seen.add(id(param))
        found.append(Gradient(name, param, accumulate_dtype))
    if not found:
        raise ValueError("GradReducer: no parameters were given")
    return found


def agreed_group(
    gradients: Sequence[Gradient], plain: FlatGroup | None, timeout: datetime.timedelta | None
) -> FlatGroup:
    """The group of all ranks that have a part in any of the reductions; all of them call.

    Raises:
        ValueError: on every rank, where they have not the same parameters in the same order; a
            plain tensor without a plain group.
    """
    ranks: set[int] = set() if plain is None else set(plain.ranks)
    for gradient in gradients:
        if isinstance(gradient.param, DTensor):
            ranks.update(gradient.param.device_mesh.mesh.flatten().tolist())
        elif plain is None:
            raise ValueError(
                f"GradReducer: {gradient.name!r} is a plain tensor: group= has to say over which "
                f"ranks its gradient is summed"
            )
    everyone = group_of_ranks(tuple(sorted(ranks)), timeout)
    lines = [_described(gradient) for gradient in gradients]
    check_agreement("GradReducer", lines, everyone.group, local_of(gradients[0].param).device)
    return everyone


def _described(gradient: Gradient) -> str:
    """Alike on all ranks: of a mesh not its ranks, for each may be on its own part of a larger."""
    param = gradient.param
    place = "a plain tensor"
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        place = f"{param.placements} on a mesh of {tuple(mesh.shape)} {mesh.mesh_dim_names}"
    return f"{gradient.name!r}, {tuple(param.shape)}, {param.dtype}, {place}"
