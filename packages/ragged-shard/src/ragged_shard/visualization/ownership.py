"""`visualize`, which prints which rank has which elements, and `Ownership`, its result."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, overload

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.visualization.parts import TensorParts, find_parts, normalize
from ragged_shard.visualization.svg import svg
from ragged_shard.visualization.terminal import print_lines, styled_lines


class Ownership(TensorParts):
    """The ranks that have each element of a tensor, with pictures.

    A notebook displays it as SVG.

    Attributes:
        shape: of the global tensor.
        mesh_shape: the size of each mesh axis.
        placements: one per axis.
        parts: one for each set of ranks that have the same elements, sorted by their lowest rank.
            Parts are disjoint, and together they cover the tensor.
        axis_names: one per axis, or None.
    """

    def text(self, width: int = 80) -> str:
        """Returns a picture in plain characters, and a table of each rank's elements.

        Args:
            width: of a line, in characters; larger tensors are scaled down to it.
        """
        return "\n".join(line.plain for line in styled_lines(self, width))

    def svg(self) -> str:
        """Returns a picture as an SVG document, with a table of each rank's elements."""
        return svg(self)

    def save_svg(self, path: str | Path) -> None:
        """Writes the SVG document to a file."""
        Path(path).write_text(self.svg(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg()


@overload
def visualize(tensor: DTensor, *, file: TextIO | None = None) -> Ownership: ...


@overload
def visualize(
    tensor: Sequence[int],
    *,
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    file: TextIO | None = None,
) -> Ownership: ...


def visualize(
    tensor: DTensor | Sequence[int],
    *,
    mesh_shape: Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
    file: TextIO | None = None,
) -> Ownership:
    """Prints which rank has which elements of a tensor, without communication.

    A single rank may call it. Rows are the tensor's leading dims, flattened, and columns its last
    dim; a cell shows the ranks that have it. Large tensors are scaled down to the terminal. The
    output is coloured if rich is installed (the extra ``cli``) and the file is a terminal.

    Args:
        tensor: a DTensor, or the shape of a tensor that need not exist.
        mesh_shape: the size of each mesh axis; with a shape only.
        placements: one per axis, with a shape only: a placement of this package, Shard,
            _StridedShard, Replicate or Partial.
        file: where to print; None is the standard output.

    Returns:
        the same as data and as SVG: ``visualize(tensor).save_svg("tensor.svg")``.

    Raises:
        TypeError: as `ownership`.
        ValueError: as `ownership`.

    Examples:
        >>> visualize((8, 6), mesh_shape=(4,), placements=[RaggedShard((0,), (1, 3, 0, 4))])
    """
    result = ownership(tensor, mesh_shape=mesh_shape, placements=placements)
    print_lines(result, file or sys.stdout)
    return result


def ownership(
    tensor: DTensor | Sequence[int],
    *,
    mesh_shape: Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
) -> Ownership:
    """Finds which ranks have which elements, without communication.

    Mesh axes apply from left to right, as in torch's `compute_local_shape_and_global_offset`, and
    the ragged one last. Ranks are those of a DTensor's mesh, and counted from 0 for a shape.

    Args:
        tensor: a DTensor, or the shape of a tensor that need not exist.
        mesh_shape: the size of each mesh axis; with a shape only.
        placements: one per axis, with a shape only: a placement of this package, Shard,
            _StridedShard, Replicate or Partial.

    Raises:
        TypeError: the tensor is not a DTensor, a shape comes without one of the other arguments, or
            a DTensor with one.
        ValueError: the mesh or the placements do not fit the tensor.
    """
    if isinstance(tensor, DTensor):
        if mesh_shape is not None or placements is not None:
            raise TypeError(
                "expected a DTensor without mesh_shape and placements, which it has itself; pass "
                "them with a shape only"
            )
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names
        return _ownership(
            tuple(tensor.shape),
            tuple(mesh.shape),
            tensor.placements,
            mesh.mesh.flatten().tolist(),
            tuple(names) if names else None,
        )
    if isinstance(tensor, torch.Tensor):  # type: ignore[unreachable]
        raise TypeError(
            f"expected a DTensor or a shape, got a {type(tensor).__name__} of shape "
            f"{tuple(tensor.shape)} on one device; pass its shape with mesh_shape= and placements="
        )
    if mesh_shape is None or placements is None:
        raise TypeError(
            f"expected both mesh_shape= and placements= with the shape {tuple(tensor)}, got "
            f"{mesh_shape} and {placements}"
        )
    sizes = tuple(mesh_shape)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"expected mesh_shape= of one size of at least 1 per axis, got {sizes}")
    return _ownership(tuple(tensor), sizes, tuple(placements), range(math.prod(sizes)), None)


def _ownership(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: Sequence[Placement],
    ranks: Sequence[int],
    axis_names: tuple[str, ...] | None,
) -> Ownership:
    placements = normalize(placements, len(shape))
    parts = find_parts(shape, mesh_shape, placements, ranks)
    return Ownership(shape, mesh_shape, placements, parts, axis_names)
