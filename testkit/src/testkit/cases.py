"""The table of cases that every package's parity tests run through.

Note: a case is a global tensor (shape, dtype), a mesh (shape) and one placement per mesh axis. The
table has the cases that fail in practice: uneven and empty shards, one dim sharded by two axes,
scalars and zero-size tensors, each kind of Partial.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

#: The names of dtypes in test ids.
SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.bool: "bool",
}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        mesh_shape: the size of each mesh axis.
        placements: one per mesh axis.
        shape: of the global tensor.
        dtype: of the global tensor.

    Raises:
        ValueError: on construction, if the placements do not fit the mesh or the shape.
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh_shape):
            raise ValueError(
                f"Case: expected one placement per axis of mesh {self.mesh_shape}, got "
                f"{self.placements}"
            )
        for placement in self.placements:
            if isinstance(placement, Shard) and not 0 <= placement.dim < len(self.shape):
                raise ValueError(
                    f"Case: expected a dim of a tensor of shape {self.shape}, got {placement}"
                )

    def __str__(self) -> str:
        """Returns the test id, e.g. ``mesh2x2-S0.R-shape5x7-f32``."""
        mesh = "x".join(map(str, self.mesh_shape))
        shape = f"shape{'x'.join(map(str, self.shape))}" if self.shape else "scalar"
        return f"mesh{mesh}-{'.'.join(map(_name, self.placements))}-{shape}-{SHORT[self.dtype]}"

    @property
    def world_size(self) -> int:
        """The number of ranks of the mesh."""
        return math.prod(self.mesh_shape)

    @property
    def partial(self) -> bool:
        """Whether a placement is Partial."""
        return any(placement.is_partial() for placement in self.placements)

    def tensor(self, seed: int = 0) -> torch.Tensor:
        """Makes the global tensor, the same in every process.

        Its values are integers from -8 to 8 (for bool, both), so that sums of a few hundred of them
        are exact in every dtype, and reductions in any order can be compared bitwise.

        Args:
            seed: of a separate generator; the default generator does not advance.

        Returns:
            a CPU tensor of `shape` and `dtype`.
        """
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-8, 9, self.shape, generator=generator)
        return values > 0 if self.dtype is torch.bool else values.to(self.dtype)

    def local(self, mesh: DeviceMesh, tensor: torch.Tensor) -> torch.Tensor:
        """Computes the calling rank's local tensor of a global tensor, without communication.

        Shards are those of `torch.chunk`, axis after axis. The terms of a Partial differ between
        ranks, and reduce exactly to the tensor (for small integers, as `tensor` returns).

        Args:
            mesh: of `mesh_shape`.
            tensor: of `shape` and any dtype.

        Returns:
            a contiguous copy.

        Raises:
            ValueError: the mesh or the tensor has another shape.
        """
        if tuple(mesh.shape) != self.mesh_shape or tuple(tensor.shape) != self.shape:
            raise ValueError(
                f"Case {self}: expected a mesh of shape {self.mesh_shape} and a tensor of shape "
                f"{self.shape}, got {tuple(mesh.shape)} and {tuple(tensor.shape)}"
            )
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        for index, size, placement in zip(
            coordinate, self.mesh_shape, self.placements, strict=True
        ):
            if isinstance(placement, Shard):
                tensor = _chunk(tensor, placement.dim, index, size)
            elif isinstance(placement, Partial):
                tensor = _contribution(tensor, placement.reduce_op, index, size)
        return tensor.clone(memory_format=torch.contiguous_format)

    def distribute(self, mesh: DeviceMesh, tensor: torch.Tensor | None = None) -> DTensor:
        """Makes a DTensor of this case without communication.

        Args:
            mesh: of `mesh_shape`, real or fake.
            tensor: the global tensor, the same on every rank; None for `self.tensor()`.

        Returns:
            a DTensor whose `full_tensor()` is `tensor`.

        Raises:
            ValueError: the mesh or the tensor has another shape.
        """
        tensor = self.tensor() if tensor is None else tensor
        local = self.local(mesh, tensor).to(mesh.device_type)
        return DTensor.from_local(
            local,
            mesh,
            self.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.contiguous().stride(),
        )


def cases(
    *,
    world_size: int | None = None,
    mesh_ndim: int | None = None,
    partial: bool = True,
    dtypes: Collection[torch.dtype] | None = None,
) -> list[Case]:
    """Selects rows of the table, in its order.

    ``@pytest.mark.parametrize("case", cases(world_size=4), ids=str)`` has readable ids.

    Args:
        world_size: the number of ranks; None for all, 1 to 8.
        mesh_ndim: the number of mesh axes; None for all.
        partial: whether to include Partial placements.
        dtypes: of the tensors; None for all.

    Raises:
        ValueError: no row is selected, as pytest skips an empty parametrization silently.
    """
    found = [
        case
        for case in _TABLE
        if world_size in (None, case.world_size)
        and mesh_ndim in (None, len(case.mesh_shape))
        and (partial or not case.partial)
        and (dtypes is None or case.dtype in dtypes)
    ]
    if not found:
        raise ValueError(
            f"cases: expected arguments that select a row, got world_size={world_size}, "
            f"mesh_ndim={mesh_ndim}, partial={partial}, dtypes={dtypes}; the table has world sizes "
            f"{sorted({case.world_size for case in _TABLE})}"
        )
    return found


def placements_named(names: str) -> tuple[Placement, ...]:
    """Parses placements from their names in a test id: ``"S0.R"``, ``"Psum.S1"``.

    Args:
        names: one per mesh axis, joined by dots.
    """
    return tuple(_placement(name) for name in names.split("."))


def _name(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        return f"P{placement.reduce_op}"
    return "R" if isinstance(placement, Replicate) else str(placement)


def _chunk(tensor: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    """Returns a chunk of `torch.chunk`; an empty one if it makes fewer chunks than ranks."""
    length = tensor.shape[dim]
    size = -(-length // count)
    start = min(size * index, length)
    return tensor.narrow(dim, start, min(size, length - start))


def _contribution(tensor: torch.Tensor, reduce_op: str, index: int, count: int) -> torch.Tensor:
    """Returns the term that rank `index` of `count` has of a Partial tensor."""
    # No two ranks have the same term, and none is zero: a missing term changes the result.
    owned = torch.arange(tensor.numel()).view(tensor.shape) % count == index
    match reduce_op:
        case "sum":
            others = count * (count - 1) // 2
            return tensor - others if index == 0 else torch.full_like(tensor, index)
        case "avg":
            return tensor + (2 * index - (count - 1))
        case "max":
            return torch.where(owned, tensor, tensor - 1)
        case "min":
            return torch.where(owned, tensor, tensor + 1)
    raise ValueError(f"Case: expected Partial of sum, avg, max or min, got {reduce_op!r}")


def _rows(
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    placements: str,
    dtype: torch.dtype = torch.float32,
) -> list[Case]:
    """Returns the cases of a line such as ``"S0.R Psum.S1"``."""
    return [Case(mesh_shape, placements_named(names), shape, dtype) for names in placements.split()]


def _placement(name: str) -> Placement:
    if name == "R":
        return Replicate()
    return Shard(int(name[1:])) if name[0] == "S" else Partial(name[1:])


_TABLE: tuple[Case, ...] = (
    *_rows((1,), (5, 7), "R S0 Psum"),
    *_rows((2,), (), "R Psum"),
    *_rows((2,), (8, 4), "R S0 S1 Psum Pavg Pmax"),
    *_rows((2,), (5, 7), "S0 S1 Psum"),
    *_rows((2,), (1, 3), "S0"),  # rank 1 has no elements
    *_rows((2,), (0, 3), "R S0 S1"),
    *_rows((2,), (4, 6, 2), "S1 S2"),
    *_rows((2,), (5, 7), "S0 Psum", torch.bfloat16),
    *_rows((2,), (5, 7), "S0", torch.float16),
    *_rows((2,), (5, 7), "S1 Pavg", torch.float64),
    *_rows((2,), (5, 7), "S0 Psum", torch.int64),
    *_rows((2,), (5, 7), "S0", torch.bool),
    *_rows((3,), (5, 7), "S0 S1 Psum"),
    *_rows((4,), (16,), "R S0"),
    *_rows((4,), (9, 2), "S0 S1 Psum Pmin"),  # 3, 3, 3, 0 rows; 1, 1, 0, 0 columns
    *_rows((4,), (9, 2), "S0", torch.bfloat16),
    *_rows((2, 2), (), "R.R Psum.R"),
    *_rows((2, 2), (8, 4), "R.R S0.R R.S0 S0.S1 S1.S0 S0.S0 S1.S1 R.S1"),
    *_rows((2, 2), (8, 4), "Psum.R R.Psum Psum.Psum Psum.S0 S0.Psum Pavg.S1 Pmax.R"),
    *_rows((2, 2), (5, 7), "S0.R S0.S0 S0.S1 S1.S1 Psum.S1"),
    *_rows((2, 2), (3, 2), "S0.S0"),  # 1, 1, 1, 0 rows
    *_rows((2, 2), (0, 3), "S0.R"),
    *_rows((2, 2), (5, 7), "S0.S1 Psum.S0", torch.bfloat16),
    *_rows((1, 2), (5, 7), "S0.S1 R.S0"),
    *_rows((2, 1), (5, 7), "S0.S0"),
    *_rows((4, 2), (9, 5), "S0.S1 S0.S0 R.S0"),
    *_rows((2, 2, 2), (8, 6, 4), "S0.S1.S2 S0.S0.R Psum.S0.S1 R.R.R"),
    *_rows((2, 2, 2), (5, 7), "S0.S1.S0 S0.S0.S0"),
)
