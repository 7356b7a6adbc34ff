"""The table of cases that every package's parity tests run through.

Note: a case is a global tensor (shape, dtype), a mesh (shape) and one placement per mesh axis. The
table holds what goes wrong in practice: uneven and empty shards, one dim sharded by two axes,
scalars and zero-size tensors, each kind of Partial.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

#: The name of a dtype in a test id.
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
        mesh_shape: size of each mesh axis.
        placements: one per mesh axis.
        shape: of the global tensor.
        dtype: of the global tensor.

    Raises:
        ValueError: on construction, for placements that fit neither mesh nor shape.
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh_shape):
            raise ValueError(f"case: {self.placements} must be one per axis of {self.mesh_shape}")
        for placement in self.placements:
            if isinstance(placement, Shard) and not 0 <= placement.dim < len(self.shape):
                raise ValueError(f"case: {placement} names no dim of a tensor of {self.shape}")

    def __str__(self) -> str:
        """The test id, e.g. ``mesh2x2-S0.R-shape5x7-f32``."""
        mesh = "x".join(map(str, self.mesh_shape))
        shape = f"shape{'x'.join(map(str, self.shape))}" if self.shape else "scalar"
        return f"mesh{mesh}-{'.'.join(map(_name, self.placements))}-{shape}-{SHORT[self.dtype]}"

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.mesh_shape)

    @property
    def partial(self) -> bool:
        """Whether some placement is Partial."""
        return any(placement.is_partial() for placement in self.placements)

    def tensor(self, seed: int = 0) -> torch.Tensor:
        """The global tensor, the same in every process.

        Its values are integers from -8 to 8 (bool: both), so that sums over a few hundred of them
        are exact in every dtype, and a reduction in any order can be compared bitwise.

        Args:
            seed: of a generator of its own; the default generator is left alone.

        Returns:
            A CPU tensor of `shape` and `dtype`.
        """
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-8, 9, self.shape, generator=generator)
        return values > 0 if self.dtype is torch.bool else values.to(self.dtype)

    def local(self, mesh: DeviceMesh, tensor: torch.Tensor) -> torch.Tensor:
        """The calling rank's part of a global tensor, computed without communication.

        Shards are `torch.chunk`'s, axis after axis. The parts of a Partial differ between ranks
        and reduce exactly to the tensor (for small integers, as `tensor` gives).

        Args:
            mesh: of `mesh_shape`.
            tensor: of `shape` and any dtype.

        Returns:
            A contiguous copy.

        Raises:
            ValueError: a mesh or a tensor of another shape.
        """
        if tuple(mesh.shape) != self.mesh_shape or tuple(tensor.shape) != self.shape:
            raise ValueError(
                f"case {self}: given a mesh of {tuple(mesh.shape)} and a tensor of "
                f"{tuple(tensor.shape)}; expected {self.mesh_shape} and {self.shape}"
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
        """A DTensor of this case, made without communication.

        Args:
            mesh: of `mesh_shape`, real or fake.
            tensor: the global tensor, the same on every rank; by default `self.tensor()`.

        Returns:
            Whose `full_tensor()` is `tensor`.

        Raises:
            ValueError: a mesh or a tensor of another shape.
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
    """Rows of the table, in its order.

    ``@pytest.mark.parametrize("case", cases(world_size=4), ids=str)`` makes readable ids.

    Args:
        world_size: only meshes of so many ranks; by default all, of 1 to 8.
        mesh_ndim: only meshes of so many axes.
        partial: include Partial placements.
        dtypes: only these; by default all.

    Raises:
        ValueError: nothing is left; an empty parametrisation would be skipped in silence.
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
            f"cases: none with world_size={world_size}, mesh_ndim={mesh_ndim}, partial={partial}, "
            f"dtypes={dtypes}; there are world sizes {sorted({c.world_size for c in _TABLE})}"
        )
    return found


def placements_named(names: str) -> tuple[Placement, ...]:
    """Placements from their names in a test id: ``"S0.R"``, ``"Psum.S1"``.

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
    """The piece of `torch.chunk`, or an empty one where it makes fewer pieces than ranks."""
    length = tensor.shape[dim]
    piece = -(-length // count)
    start = min(piece * index, length)
    return tensor.narrow(dim, start, min(piece, length - start))


def _contribution(tensor: torch.Tensor, reduce_op: str, index: int, count: int) -> torch.Tensor:
    """What rank `index` of `count` holds of a Partial tensor."""
    # No two ranks have the same part and none has zeros: a missing part changes the sum.
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
    raise ValueError(f"case: no exact contributions are known for Partial({reduce_op!r})")


def _rows(
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    placements: str,
    dtype: torch.dtype = torch.float32,
) -> list[Case]:
    """Cases from a line such as ``"S0.R Psum.S1"``."""
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
    *_rows((2,), (1, 3), "S0"),  # rank 1 holds nothing
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
