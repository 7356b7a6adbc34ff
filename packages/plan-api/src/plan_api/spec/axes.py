"""The axes of a mesh, by name."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Sequence
from typing import SupportsIndex

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["axis_names", "resolve_axes"]


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Returns the names of a mesh's axes; for a mesh without names, their numbers as text."""
    return mesh.mesh_dim_names or tuple(str(axis) for axis in range(mesh.ndim))


def resolve_axes(
    axes: str | int | Sequence[str | int] | DeviceMesh | None, mesh: DeviceMesh, what: str
) -> tuple[str, ...]:
    """Returns the names of axes.

    Args:
        axes: a name, a number, several of them, a sub-mesh, or None for all.
        mesh: of the plan.
        what: begins messages.

    Raises:
        ValueError: the mesh has no such axis, or the sub-mesh is of another mesh.
    """
    names = axis_names(mesh)
    if axes is None:
        return names
    if isinstance(axes, DeviceMesh):
        return _axes_of_submesh(axes, mesh, what)
    listed = (axes,) if isinstance(axes, (str, SupportsIndex)) else tuple(axes)
    found = []
    for axis in listed:
        number = operator.index(axis) if isinstance(axis, SupportsIndex) else len(names)
        name = names[number] if number < len(names) else axis
        if name not in names:
            close = difflib.get_close_matches(str(name), names, 1, 0.5)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"{what}: the plan's mesh has axes {names}, not {axis!r}{hint}")
        found.append(str(name))
    if len(set(found)) != len(found):
        raise ValueError(f"{what}: axes {tuple(listed)} name one axis twice")
    return tuple(found)


def _axes_of_submesh(submesh: DeviceMesh, mesh: DeviceMesh, what: str) -> tuple[str, ...]:
    if submesh == mesh:
        return axis_names(mesh)
    names = submesh.mesh_dim_names or ()
    if not names or not set(names) <= set(axis_names(mesh)) or mesh[names] != submesh:
        raise ValueError(
            f"{what}: {submesh} is no sub-mesh of the plan's mesh {mesh}: one tensor cannot be on "
            f"meshes without a common root; make the plan for the root mesh"
        )
    return tuple(names)
