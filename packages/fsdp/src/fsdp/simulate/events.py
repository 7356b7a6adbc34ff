"""The events of a step on one rank, in order: compute, collectives, and stages of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fsdp.collectives.stages import GroupStage

__all__ = [
    "COLLECTIVE_NAMESPACES",
    "CommEvent",
    "ComputeWork",
    "StageEvent",
    "StepEvent",
    "operator_work",
    "read_collective",
    "tensors_in",
]

# The names and the search for the group are those of plan_api.inspect.collectives, of which
# this is a copy: neither package depends on the other.
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
# The prefix of an operator's name, without leading underscores, and the collective.
_NAMES = (
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("shard_dim_alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
    ("recv", "recv"),
)


@dataclass(frozen=True)
class ComputeWork:
    """An amount of computation.

    Attributes:
        flops: flops of matrix products and attention.
        nbytes: bytes that the other operators read and write.
        ops: number of operator calls, including views.
    """

    flops: int = 0
    nbytes: int = 0
    ops: int = 0

    def __add__(self, other: ComputeWork) -> ComputeWork:
        """Returns the sum."""
        return ComputeWork(
            self.flops + other.flops, self.nbytes + other.nbytes, self.ops + other.ops
        )


@dataclass(frozen=True)
class StageEvent:
    """The end of a stage of a group's collective.

    Attributes:
        stage: the stage.
        collective: identifies the all-gather or the reduction of the group.
    """

    stage: GroupStage
    collective: int


@dataclass(frozen=True)
class CommEvent:
    """A collective, a send or a receive that reached a process group of more than one rank.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv", ...
        input_bytes: bytes that this rank gives; 0 for recv.
        output_bytes: bytes that this rank gets; the same memory as the input for all_reduce and
            broadcast; 0 for send.
        dtype: as in "float32".
        group: name of the process group.
        ranks: number of ranks of the group.
        rank: this rank's index in the group.
        during: the stage in which it was issued; None outside of all stages.
    """

    op: str
    input_bytes: int
    output_bytes: int
    dtype: str
    group: str
    ranks: int
    rank: int
    during: StageEvent | None = None


StepEvent: TypeAlias = ComputeWork | CommEvent | StageEvent


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Returns the tensors of arguments or results."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


# Collectives.


def read_collective(
    func: Any, args: tuple[Any, ...], result: Any, during: StageEvent | None
) -> CommEvent | None:
    """Returns the collective of a dispatched operator, functional or of c10d.

    None is returned for operators that send nothing: waits, barriers and groups of one rank.
    """
    own = func._schema.name.partition("::")[2].lstrip("_")
    op = next((name for start, name in _NAMES if own.startswith(start)), "")
    group = _group_of(func, args) if op else None
    if group is None or group.size() == 1:
        return None
    given = list(tensors_in(args))
    sizes = [tensor.nbytes for tensor in given]
    if op in ("send", "recv"):
        received, sent = (sizes[0], 0) if op == "recv" else (0, sizes[0])
    elif func.namespace == "c10d" and op in ("all_gather", "reduce_scatter"):  # both are arguments
        large, small = max(sizes), min(sizes)
        sent, received = (small, large) if op == "all_gather" else (large, small)
    elif func.namespace == "c10d" or op in ("all_reduce", "all_to_all"):
        sent = received = sizes[0]
    else:
        sent, received = sum(sizes), sum(tensor.nbytes for tensor in tensors_in(result))
    dtype = str(given[0].dtype).removeprefix("torch.")
    return CommEvent(
        op, sent, received, dtype, group.group_name, group.size(), group.rank(), during
    )


def _group_of(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Returns the process group among an operator's arguments, by name or boxed."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if isinstance(value, dist.ProcessGroup):
            return value
        if argument.name == "group_name" and isinstance(value, str):
            return _resolve_process_group(value)  # type: ignore[arg-type]  # a NewType of str
        if str(argument.type).endswith("c10d.ProcessGroup"):
            return dist.ProcessGroup.unbox(value)
    return None


# Compute.


def operator_work(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> ComputeWork:
    """Returns the amount of computation of an operator call; none of a query of a tensor."""
    if func.namespace == "prim":  # fake tensors, unlike real ones, dispatch `tensor.device`
        return ComputeWork()
    count = _FLOPS.get(func._overloadpacket)
    if count is not None:
        return ComputeWork(int(count(*args, **kwargs, out_val=out)), 0, 1)
    if func.is_view or func._overloadpacket in _WITHOUT_KERNEL:
        return ComputeWork(ops=1)
    tensors = {id(tensor): tensor for tensor in tensors_in((args, kwargs, out))}
    return ComputeWork(0, sum(tensor.nbytes for tensor in tensors.values()), 1)


def _grouped_mm_flops(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Returns the flops of a product of rows with one matrix per expert."""
    return 2 * a.numel() * b.shape[-1]


def _attention_flops(query: torch.Tensor, key: torch.Tensor, products: int) -> int:
    """Returns the flops of `products` products of the size of query times key."""
    return 2 * products * query.numel() * key.shape[-2]


# They allocate, or are views without a declaration as such: no memory is read or written.
_WITHOUT_KERNEL = {
    torch.ops.aten._unsafe_view,
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}

_FLOPS: dict[Any, Callable[..., Any]] = {
    **flop_registry,
    torch.ops.aten._grouped_mm: _grouped_mm_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *args, **kwargs: _attention_flops(q, k, 2)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *args, **kwargs: _attention_flops(q, k, 5)
    ),
}
