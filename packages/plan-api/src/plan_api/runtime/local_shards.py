"""The local shards of tensors: their shapes, their global sizes, and their memory.

Note: shards are those of `torch.chunk`: the first ones are equal, then one may be shorter, and the
rest empty. So a local tensor tells the global size only where all ranks have equal shards.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from plan_api.runtime.attribution import preparing
from plan_api.runtime.containers import map_tensors

__all__ = [
    "ShardSizes", "TensorSizes", "chunk_length", "chunk_offset", "local_shape",
    "redistribute_compact", "shard_length", "spec_with_dtype",
]  # fmt: skip


def chunk_length(length: int, ranks: int, rank: int) -> int:
    """Returns the length of a rank's shard of a dim; rank 0 has the longest."""
    full = -(-length // ranks)
    return max(0, min(full, length - full * rank))


def chunk_offset(length: int, ranks: int, rank: int) -> int:
    """Returns where a rank's shard of a dim begins."""
    return min(-(-length // ranks) * rank, length)


def shard_length(placement: Placement, length: int, ranks: int, rank: int) -> int:
    """Returns the length of a rank's shard of a dim, for placements of any package.

    ragged-shard's InterleavedShard shards each part of a fused projection, in units.

    Args:
        placement: shards the dim.
        length: of the dim.
        ranks: of the axis.
        rank: on the axis.
    """
    unit: int = getattr(placement, "unit", 1)
    parts = _parts(placement)
    return parts * unit * chunk_length(length // (parts * unit), ranks, rank)


class ShardSizes:
    """Knows the global sizes of dims that the ranks of a mesh shard, for one model.

    Along an axis all shards are even until something is sharded unevenly: a parameter, or a tensor
    at a site, where the global size is known. From then on the ranks along the axis exchange the
    lengths of their shards where a size is asked for, once for each place and each set of shapes of
    the model's inputs: these are the same on all ranks, so all ask, or none does.

    Nothing is exchanged for FakeTensors, and between the ranks of a fake process group. There a
    size is taken for that of an uneven dim with the same local length, or else for an even one.

    Args:
        mesh: the plan's mesh.
        params: by placements with which modules compute, the shapes of the parameters.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        params: Iterable[tuple[Sequence[Placement], Sequence[int]]] = (),
    ) -> None:
        self._mesh = mesh
        self._ranks = [mesh.size(axis) for axis in range(mesh.ndim)]
        self._uneven: set[int] = set()  # axes
        self._of_params: list[tuple[int, Placement, int]] = []  # axis, placement and global size
        self._of_call: dict[tuple[int, int], int] = {}  # by axis and dim, the last global size
        self._inputs: tuple[Any, ...] = ()
        self._asked: Counter[str] = Counter()
        self._known: dict[tuple[Any, ...], list[int]] = {}
        self._exchange = _exchange
        for placements, shape in params:
            self._add_param(placements, shape)

    def begin_call(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Begins a call of the model, whose other sizes follow from the shapes of its inputs."""
        if "torch._dynamo" in sys.modules and self._exchange is _exchange:
            # Importing it takes a second. A graph cannot read what it receives.
            self._exchange = torch.compiler.disable(_exchange)
        self._asked.clear()
        self._of_call.clear()
        self._inputs = tuple(_described(one) for one in (*args, *kwargs.values()))

    @property
    def mesh(self) -> DeviceMesh:
        """The plan's mesh."""
        return self._mesh

    def ranks(self, axis: int) -> int:
        """Returns the number of ranks along an axis."""
        return self._ranks[axis]

    def shard(self, axis: int, dim: int, length: int) -> int | None:
        """Takes note of a dim of known size that ranks shard along an axis from now on.

        Args:
            axis: the number of the axis.
            dim: of a tensor.
            length: on all ranks along the axis together.

        Returns:
            the length; None if the shards are even.
        """
        if length % self._ranks[axis] == 0:
            return None
        self._uneven.add(axis)
        self._of_call[axis, dim] = length
        return length

    def length(self, what: str, axis: int, dim: int, tensor: torch.Tensor) -> int | None:
        """Returns the length of a dim on all ranks along an axis together, which shards it.

        All ranks along the axis call it.

        Args:
            what: names the tensor.
            axis: the number of the axis.
            dim: of the tensor.
            tensor: this rank's.

        Returns:
            the length; None if all shards are even.

        Raises:
            ValueError: the shards are not those of `torch.chunk`, or the length is another one than
                in a call of the model with inputs of the same shapes.
        """
        return self._length(what, axis, Shard(dim), tensor, tensor.shape[dim])

    def global_shape(
        self, what: str, tensor: torch.Tensor, placements: Sequence[Placement]
    ) -> torch.Size:
        """Returns the global shape of a local tensor; all ranks of the mesh call it.

        Args:
            what: names the tensor.
            tensor: this rank's.
            placements: one per axis.

        Raises:
            ValueError: as `length`.
        """
        shape = list(tensor.shape)
        for axis, placement in reversed([*enumerate(placements)]):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                length = self._length(what, axis, placement, tensor, shape[dim])
                shape[dim] = shape[dim] * self._ranks[axis] if length is None else length
        return torch.Size(shape)

    def count(self, what: str, tensor: torch.Tensor, placements: Sequence[Placement]) -> int:
        """Returns the number of elements on all ranks together, however long their shards are.

        All ranks of the mesh call it.

        Args:
            what: names the tensor.
            tensor: this rank's.
            placements: one per axis.
        """
        count = tensor.numel()
        for axis, placement in reversed([*enumerate(placements)]):
            if placement.is_replicate():
                continue
            if axis in self._uneven and self._can_send(axis, tensor):
                count = sum(self._lengths(what, axis, -1, tensor, count))
            else:
                count *= self._ranks[axis]
        return count

    def at(self, what: str, placements: Sequence[Placement]) -> TensorSizes:
        """Returns the sizes of one tensor; see `global_shape`."""
        return TensorSizes(self, what, tuple(placements))

    def as_dtensor(
        self,
        what: str,
        tensor: torch.Tensor,
        placements: Sequence[Placement],
        shape: torch.Size | None = None,
    ) -> DTensor:
        """Returns a local tensor as a DTensor; all ranks of the mesh call it.

        Args:
            what: names the tensor.
            tensor: this rank's.
            placements: one per axis.
            shape: the global shape; None: asked for.

        Raises:
            ValueError: as `length`.
        """
        if not self._uneven:
            return DTensor.from_local(tensor, self._mesh, placements, run_check=False)
        shape = shape or self.global_shape(what, tensor, placements)
        stride = _dense_stride(shape, tensor.stride())
        return DTensor.from_local(
            tensor, self._mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def _length(
        self, what: str, axis: int, placement: Any, tensor: torch.Tensor, own: int
    ) -> int | None:
        """Returns the length of chunks, or None if they are even."""
        if axis not in self._uneven:
            return None
        ranks = self._ranks[axis]
        if not self._can_send(axis, tensor):
            return self._assumed(axis, placement, own)
        lengths = self._lengths(what, axis, placement.dim, tensor, own)
        length = sum(lengths)
        expected = [shard_length(placement, length, ranks, rank) for rank in range(ranks)]
        if [*lengths] != expected:
            raise ValueError(
                f"{what}: expected the shards of a dim {placement.dim} of {length} that "
                f"torch.chunk makes, of lengths {expected}, got {[*lengths]}, as of a dim that was "
                f"flattened; redistribute the tensor before the operator that makes them"
            )
        return length if len({*expected}) > 1 else None

    def _lengths(
        self, what: str, axis: int, dim: int, tensor: torch.Tensor, own: int
    ) -> Sequence[int]:
        """Returns the lengths of all ranks' shards along an axis."""
        key = (self._inputs, what, axis, dim, self._asked[what])
        self._asked[what] += 1
        if key not in self._known:
            group = self._mesh.get_group(axis).group_name
            with preparing():
                self._known[key] = self._exchange(own, tensor.device, self._ranks[axis], group)
        expected = self._known[key][self._mesh.get_local_rank(axis)]
        if own != expected:
            raise ValueError(
                f"{what}: expected a shard of size {expected} on this rank, as in an earlier call "
                f"of the model with inputs of the same shapes, got {own}: in static mode the sizes "
                f"of uneven shards follow from the shapes of inputs; use mode='eager'"
            )
        return self._known[key]

    def _can_send(self, axis: int, tensor: torch.Tensor) -> bool:
        is_fake = isinstance(tensor, FakeTensor)
        return not is_fake and dist.get_backend(self._mesh.get_group(axis)) != "fake"

    def _add_param(self, placements: Sequence[Placement], shape: Sequence[int]) -> None:
        ranks: dict[int, int] = {}
        for axis, placement in enumerate(placements):
            if placement.is_replicate() or self._ranks[axis] == 1:
                continue
            dim = getattr(placement, "dim", None)
            if dim is None:  # ragged
                self._uneven.add(axis)
                continue
            # Of a fused projection each part is sharded, in units.
            units = shape[dim] // (_parts(placement) * getattr(placement, "unit", 1))
            ranks[dim] = ranks.get(dim, 1) * self._ranks[axis]
            if units % ranks[dim]:
                self._uneven.add(axis)
                self._of_params.append((axis, placement, shape[dim]))

    def _assumed(self, axis: int, placement: Placement, own: int) -> int | None:
        """Returns the size that an uneven dim has, of which this rank's shard is as long."""
        ranks, rank = self._ranks[axis], self._mesh.get_local_rank(axis)
        dim: int = placement.dim  # type: ignore[attr-defined]
        found = [(placement, self._of_call.get((axis, dim)))]
        found += [(one, length) for other, one, length in self._of_params if other == axis]
        for one, length in found:
            if length is not None and shard_length(one, length, ranks, rank) == own:
                return length
        return None


@dataclass(frozen=True)
class TensorSizes:
    """The global sizes of one tensor of a model.

    Attributes:
        sizes: of the model.
        what: names the tensor.
        placements: one per axis.
    """

    sizes: ShardSizes
    what: str
    placements: tuple[Placement, ...]

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the model's plan."""
        return self.sizes.mesh

    def length(self, axis: int, dim: int, tensor: torch.Tensor) -> int:
        """Returns the length of a dim that an axis shards, on all its ranks together."""
        length = self.sizes.length(self.what, axis, dim, tensor)
        return tensor.shape[dim] * self.sizes.ranks(axis) if length is None else length

    def count(self, tensor: torch.Tensor) -> int:
        """Returns the number of elements on all ranks together, however long their shards are."""
        return self.sizes.count(self.what, tensor, self.placements)

    def global_shape(self, tensor: torch.Tensor) -> torch.Size:
        """Returns the global shape; all ranks of the mesh call it with their local tensors."""
        return self.sizes.global_shape(self.what, tensor, self.placements)

    def as_dtensor(self, tensor: torch.Tensor, shape: torch.Size | None = None) -> DTensor:
        """Returns the DTensor of a global shape; without one, all ranks of the mesh call it."""
        return self.sizes.as_dtensor(self.what, tensor, self.placements, shape)


def _dense_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a dense tensor whose dims are in the order that strides have."""
    strides, below = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        strides[dim], below = below, below * shape[dim]
    return tuple(strides)


def _described(argument: Any) -> Any:
    """Returns what sizes may follow from: the shape of a tensor, or an integer, flag or name."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape)
    if argument is None or isinstance(argument, (int, str)):
        return argument
    shapes: list[tuple[int, ...]] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    map_tensors(argument, add)
    return tuple(shapes)


def _exchange(own: int, device: torch.device, ranks: int, group: str) -> list[int]:
    """Returns the lengths that all ranks of a group have."""
    ops = torch.ops._c10d_functional
    with torch.no_grad():
        length = torch.tensor([own], device=device)
        lengths: list[int] = ops.wait_tensor(
            ops.all_gather_into_tensor(length, ranks, group)
        ).tolist()
    return lengths


def _parts(placement: Placement) -> int:
    """Returns in how many parts a dim is sharded: more than one by ragged-shard's interleaved."""
    return getattr(placement, "interleaves", 1)


def local_shape(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Size:
    """Returns the shape of this rank's shard of a tensor, for placements of any package.

    Torch's `compute_local_shape_and_global_offset` takes placements whose shard is one box;
    distributing a tensor on ``meta`` is what `parallelize` does with the tensor itself.

    Args:
        tensor: any; for a DTensor, the shape of its local tensor is returned.
        mesh: for other tensors.
        placements: for other tensors, one per axis.
    """
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.shape
    hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    # A strided shard subdivides a shard that is replicated so far.
    shards = [Replicate() if isinstance(p, _StridedShard) else p for p in placements]
    placed = distribute_tensor(hollow, mesh, shards, src_data_rank=None)
    return placed.redistribute(placements=placements)._local_tensor.shape


def redistribute_compact(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Redistributes a DTensor, into storage that holds its local shard only."""
    moved = tensor.redistribute(placements=placements)
    local = moved._local_tensor
    if local.untyped_storage().nbytes() > local.nbytes:
        moved = DTensor(local.clone(), moved._spec, requires_grad=False)
    return moved


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Returns a spec for a tensor of a dtype: operators derive their results' dtypes from it."""
    meta: Any = spec.tensor_meta
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=dtype))
