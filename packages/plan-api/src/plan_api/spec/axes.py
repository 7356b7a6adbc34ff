"""Axes of a mesh, by name."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Sequence
from typing import SupportsIndex

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["axes_of", "axis_names"]


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes; of a mesh without names, their numbers."""
    return mesh.mesh_dim_names or tuple(str(axis) for axis in range(mesh.ndim))


def axes_of(
    given: str | int | Sequence[str | int] | DeviceMesh | None, mesh: DeviceMesh, what: str
) -> tuple[str, ...]:
    """The names of the axes that are meant.

    Args:
        given: a name, a number, several, a sub-mesh, or None for all.
        mesh: the plan's.
        what: begins messages.

    Raises:
        ValueError: the mesh has no such axis, or the sub-mesh is of another one.
    """
    names = axis_names(mesh)
    if given is None:
        return names
    if isinstance(given, DeviceMesh):
        return _of_submesh(given, mesh, what)
    asked = (given,) if isinstance(given, (str, SupportsIndex)) else tuple(given)
    found = []
    for axis in asked:
        number = operator.index(axis) if isinstance(axis, SupportsIndex) else len(names)
        name = names[number] if number < len(names) else axis
        if name not in names:
            close = difflib.get_close_matches(str(name), names, 1, 0.5)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"{what}: the plan's mesh has axes {names}, not {axis!r}{hint}")
        found.append(str(name))
    if len(set(found)) != len(found):
        raise ValueError(f"{what}: axes {tuple(asked)} name one axis twice")
    return tuple(found)


def _of_submesh(given: DeviceMesh, mesh: DeviceMesh, what: str) -> tuple[str, ...]:
    if given == mesh:
        return axis_names(mesh)
    named = given.mesh_dim_names or ()
    if not named or not set(named) <= set(axis_names(mesh)) or mesh[named] != given:
        raise ValueError(
            f"{what}: {given} is no sub-mesh of the plan's mesh {mesh}: one tensor cannot be on "
            f"meshes without a common root; make the plan for the root mesh"
        )
    return tuple(named)
