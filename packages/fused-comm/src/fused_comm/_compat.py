"""What differs between the supported versions of torch; tests/test_compat.py has the canaries.

dbuffer has its own copy of the collectives' names, with aliases of the tensors: neither package
depends on the other.
"""

from __future__ import annotations

import pickle
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

# Since 2.13 the old name warns.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(
    output: torch.Tensor, tensor: torch.Tensor, op: Any, group: dist.ProcessGroup
) -> dist.Work:
    """Starts `reduce_scatter_tensor`, under the name that this torch prefers."""
    work: dist.Work = _REDUCE_SCATTER(output, tensor, op, group=group, async_op=True)
    return work


def all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> dist.Work:
    """Starts `all_reduce`; a function for its type."""
    work: dist.Work = dist.all_reduce(tensor, op, group=group, async_op=True)
    return work


def all_gather(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts `all_gather_into_tensor`, under the name that this torch prefers."""
    work: dist.Work = _ALL_GATHER(output, tensor, group=group, async_op=True)
    return work


def is_viewed(tensor: torch.Tensor) -> bool:
    """Whether any other tensor shares the memory of this one."""
    # Two references: of this tensor, and of the storage object of this call.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2


def dtensor(
    local: torch.Tensor,
    param: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
) -> DTensor:
    """Makes the DTensor that `DTensor.from_local` makes, in a tenth of the time.

    Args:
        local: the local tensor.
        param: a parameter with the global shape.
        mesh: as in `DTensor.from_local`.
        placements: as in `DTensor.from_local`.
    """
    stride = param.stride() if param.is_contiguous() else _contiguous_stride(param.shape)
    meta = TensorMeta(param.shape, stride, local.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def all_to_all(
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    received: list[int] | None = None,
    sent: list[int] | None = None,
) -> dist.Work:
    """Starts `all_to_all_single`; a function for its type.

    Args:
        output: 1-D.
        tensor: the input, 1-D.
        group: of the ranks.
        received: the number of elements from each rank; by default equal numbers.
        sent: the number of elements to each rank; by default equal numbers.
    """
    work: dist.Work = dist.all_to_all_single(
        output, tensor, received, sent, group=group, async_op=True
    )
    return work


class FlightRecorderEntry(TypedDict):
    """The fields of a flight recorder entry that `diagnosis` reads."""

    process_group: tuple[str, str]
    collective_seq_id: int
    p2p_seq_id: int
    is_p2p: bool
    profiling_name: str
    input_sizes: list[list[int]]
    input_dtypes: list[str]
    time_created_ns: int
    frames: list[dict[str, Any]]


def flight_recorder_dump() -> bytes:
    """Returns the flight recorder's pickle, with gloo's collectives (since torch 2.11)."""
    dump: bytes = c10d._dump_fr_trace()  # type: ignore[attr-defined]
    return dump


def flight_recorder_entries() -> list[FlightRecorderEntry]:
    """Returns the entries of the flight recorder, the oldest first."""
    entries: list[FlightRecorderEntry] = pickle.loads(flight_recorder_dump()).get("entries", [])
    return entries


def process_group_named(name: str) -> dist.ProcessGroup | None:
    """Returns the process group of this name in the flight recorder; None if it was destroyed."""
    try:
        return distributed_c10d._resolve_process_group(distributed_c10d.GroupName(name))
    except (KeyError, RuntimeError, ValueError):
        return None


def started_collectives(group: dist.ProcessGroup) -> float:
    """Returns how many collectives this rank has started on a group; infinity if not counted."""
    try:
        return group._get_sequence_number_for_group()  # type: ignore[attr-defined,no-any-return]
    except RuntimeError:  # a fake process group's backend
        return float("inf")


def default_group() -> dist.ProcessGroup:
    """Returns the process group of all ranks."""
    return distributed_c10d._get_default_group()


def connect_to_store() -> dist.Store:
    """Opens another connection to the store of the default process group."""
    store: dist.Store = distributed_c10d._get_default_store()
    try:
        return store.clone()  # type: ignore[attr-defined,no-any-return]
    except RuntimeError:  # the store of a fake process group, which is in this process
        return store
