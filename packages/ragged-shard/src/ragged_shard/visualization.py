"""Shows in the terminal which rank holds which elements of a tensor."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TextIO, overload

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.ownership import Ownership, ownership
from ragged_shard.picture.captions import DARK
from ragged_shard.picture.terminal import Line, lines


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
    """Prints which rank holds which elements of a tensor. Nothing is sent; one rank may call it.

    The tensor's leading dims are the rows, flattened, and its last dim is the columns; a cell has
    the ranks that hold it. Large tensors are scaled down to the terminal. In colour where rich is
    installed (the extra ``cli``) and the file is a terminal.

    Args:
        tensor: a DTensor, or the shape of a tensor that need not exist.
        mesh_shape: size of each axis; with a shape only.
        placements: one per axis, with a shape only: ours, Shard, _StridedShard, Replicate, Partial.
        file: what to print to; None is the standard output.

    Returns:
        What was printed, as data and as SVG: ``visualize(tensor).save_svg("tensor.svg")``.

    Raises:
        TypeError: as `ownership`.
        ValueError: as `ownership`.

    Example:
        >>> visualize((8, 6), mesh_shape=(4,), placements=[RaggedShard((0,), (1, 3, 0, 4))])
    """
    found = ownership(tensor, mesh_shape=mesh_shape, placements=placements)
    _print(found, file or sys.stdout)
    return found


def _print(found: Ownership, file: TextIO) -> None:
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(found.text(shutil.get_terminal_size().columns), file=file)
        return

    def coloured(line: Line) -> Text:
        text = Text()
        for span in line.spans:
            front = "white" if span.colour in DARK else "black"
            text.append(span.text, f"{front} on {span.colour}" if span.colour else "")
        return text

    console = Console(file=file, highlight=False)
    for line in lines(found, console.width):
        console.print(coloured(line), soft_wrap=True)
