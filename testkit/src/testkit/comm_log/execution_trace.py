"""Finds collectives and products in an execution trace (`torch.profiler.ExecutionTraceObserver`).

Nodes carry a schema, their arguments' values, shapes and dtypes, and an id given when they start;
they are written when they end. Their parent links are not used: gloo ends its own nodes on other
threads, after which torch's link points to stale nodes. The order of starts and ends is reliable.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import flop_counter

from testkit.comm_log.collective import Collective, Op

_LONGEST_LIST = 4096  # torch cuts longer ones, after one more element


class _Kind(NamedTuple):
    """How to read one c10d operator: its name here, and which arguments hold what."""

    op: Op
    inputs: str | None
    outputs: str | None


_KINDS: dict[str, _Kind] = {
    "allgather_": _Kind("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": _Kind("all_gather", "input_tensor", "output_tensor"),
    "allgather_coalesced_": _Kind("all_gather", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": _Kind("all_gather", "inputs", "outputs"),
    "reduce_scatter_": _Kind("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": _Kind("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": _Kind("reduce_scatter", "inputs", "outputs"),
    "allreduce_": _Kind("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": _Kind("all_reduce", "tensors", "tensors"),
    "alltoall_": _Kind("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": _Kind("all_to_all", "input", "output"),
    "broadcast_": _Kind("broadcast", "tensors", "tensors"),
    "reduce_": _Kind("reduce", "tensors", "tensors"),
    "gather_": _Kind("gather", "input_tensors", "output_tensors"),
    "scatter_": _Kind("scatter", "input_tensors", "output_tensors"),
    "send": _Kind("send", "tensors", None),
    "recv_": _Kind("recv", None, "tensors"),
    "recv_any_source_": _Kind("recv", None, "tensors"),
    "barrier": _Kind("barrier", None, None),
    "monitored_barrier_": _Kind("barrier", None, None),
}
_NO_COLLECTIVE = {"check_for_nan"}

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "long int": "int64",
    "int": "int32",
    "short int": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}


@dataclass(frozen=True)
class _TraceNode:
    """One node of the trace, its arguments by name.

    Attributes:
        start: grows with the time of its start.
        end: grows with the time of its end.
        thread: the thread it ran on.
        name: the operator, with its namespace.
        values: argument values; a tensor is ``[id, storage, offset, numel, itemsize, device]``.
        types: argument types as written by torch, e.g. ``"GenericList[Tensor(float)]"``.
        shapes: of the arguments in order, of what is no tensor ``[]``.
    """

    start: int
    end: int
    thread: int
    name: str
    values: Mapping[str, Any]
    types: Mapping[str, str]
    shapes: Sequence[Any] = ()

    @property
    def on_meta(self) -> bool:
        tensors = (tensor for value in self.values.values() for tensor in _tensors(value, self))
        return any(tensor[5] == "meta" for tensor in tensors)

    def encloses(self, other: _TraceNode) -> bool:
        return self.thread == other.thread and self.start < other.start and self.end > other.end


@dataclass(frozen=True)
class _Group:
    name: str | None = None
    size: int | None = None
    rank: int | None = None


def read_collectives(trace: Mapping[str, Any]) -> tuple[Collective, ...]:
    """Reads the collectives of a trace, in order of issue.

    Sizes and ranks of groups are looked up in this process, so call it while the groups exist.

    Args:
        trace: the observer's file, parsed.

    Raises:
        RuntimeError: an operator of c10d that is not known here, or a list that torch cut short.
    """
    calls = _read_calls(trace)
    named = [call for call in calls if isinstance(call.values.get("group_name"), str)]
    found = [call for call in calls if call.name.startswith("c10d::")]
    return tuple(
        _read_collective(call, _group_of(call, named))
        for call in sorted(found, key=lambda call: call.start)
        if call.name.removeprefix("c10d::") not in _NO_COLLECTIVE
    )


# Of each operator the FLOPs by the shapes of its first tensors, as torch's own counter has them.
_PRODUCTS: dict[str, Callable[..., int]] = {
    "aten::mm": flop_counter.mm_flop,
    "aten::addmm": flop_counter.addmm_flop,
    "aten::bmm": flop_counter.bmm_flop,
    "aten::baddbmm": flop_counter.baddbmm_flop,
    "aten::_scaled_dot_product_flash_attention_for_cpu": flop_counter.sdpa_flop_count,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        flop_counter.sdpa_backward_flop_count
    ),
}
_PRODUCT_TENSORS = {
    "aten::mm": 2, "aten::addmm": 3, "aten::bmm": 2, "aten::baddbmm": 3,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 3,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 4,
}  # fmt: skip


def read_product_flops(trace: Mapping[str, Any]) -> int:
    """Returns the FLOPs of the matrix products and the fused CPU attention of a trace.

    Those that this process computed: an operator on DTensors is recorded too, with the shapes of
    the whole tensors, and encloses the one on local tensors, which alone counts. Where DTensor
    asks for the shape of a result, it encloses one on meta tensors, which computes nothing.

    Args:
        trace: the observer's file, parsed.
    """
    calls = sorted(
        (call for call in _read_calls(trace) if call.name in _PRODUCTS),
        key=lambda call: (call.thread, call.start),
    )
    # In the order of their starts, what a call encloses comes directly behind it.
    return sum(
        _PRODUCTS[call.name](*call.shapes[: _PRODUCT_TENSORS[call.name]])
        for call, following in itertools.zip_longest(calls, calls[1:])
        if not (following and call.encloses(following)) and not call.on_meta
    )


def _read_calls(trace: Mapping[str, Any]) -> list[_TraceNode]:
    return [call for end, node in enumerate(trace["nodes"]) if (call := _read_call(end, node))]


def _read_call(end: int, node: Mapping[str, Any]) -> _TraceNode | None:
    attributes = {attribute["name"]: attribute["value"] for attribute in node["attrs"]}
    schema = attributes.get("op_schema", "")
    if " -> " not in schema:  # an annotation, not an operator
        return None
    arguments = schema[schema.index("(") + 1 : schema.index(") -> ")].split(", ")
    names = [argument.split("=")[0].split()[-1] for argument in arguments if argument]
    inputs = node["inputs"]
    return _TraceNode(
        start=node["id"],
        end=end,
        thread=attributes["tid"],
        name=node["name"],
        values=dict(zip(names, inputs["values"], strict=False)),  # "*" of keyword-only arguments
        types=dict(zip(names, inputs["types"], strict=False)),
        shapes=inputs["shapes"],
    )


def _read_collective(call: _TraceNode, group: _Group) -> Collective:
    kind = _KINDS.get(call.name.removeprefix("c10d::"))
    if kind is None:
        raise RuntimeError(
            f"CommLog: torch ran {call.name}, whose bytes testkit does not know; add it to _KINDS "
            "of testkit.comm_log.execution_trace"
        )
    given = call.values[kind.inputs] if kind.inputs else []
    taken = call.values[kind.outputs] if kind.outputs else []
    size = group.size
    if kind.op == "all_to_all":
        size = size or len(call.values.get("input_split_sizes", given)) or None
    return Collective(
        op=kind.op,
        input_bytes=_bytes(given, call),
        output_bytes=_bytes(taken, call),
        # The receivers of a scatter give nothing, the senders of a gather get nothing.
        dtype=_dtype(call.types.get(kind.inputs or "", ""))
        or _dtype(call.types.get(kind.outputs or "", "")),
        group=group.name,
        group_size=size,
        group_rank=group.rank,
        root=call.values.get("root_rank"),
        input_splits=_splits(call, "input", size) if kind.op == "all_to_all" else (),
        output_splits=_splits(call, "output", size) if kind.op == "all_to_all" else (),
    )


def _splits(call: _TraceNode, side: str, size: int | None) -> tuple[int, ...]:
    """Bytes per peer of an all_to_all: one tensor and its row counts, or a tensor per peer."""
    if side not in call.values:
        return tuple(_bytes([tensor], call) for tensor in call.values[f"{side}_tensors"])
    total = _bytes(call.values[side], call)
    rows = call.values[f"{side}_split_sizes"] or [1] * (size or 0)  # none given: even
    return tuple(total * count // max(sum(rows), 1) for count in rows)


def _bytes(value: Any, call: _TraceNode) -> int:
    return sum(math.prod(tensor[3:5]) for tensor in _tensors(value, call))


def _tensors(value: Any, call: _TraceNode) -> Iterator[Sequence[Any]]:
    if not isinstance(value, list):
        return
    if len(value) == 6 and isinstance(value[5], str):
        yield value
        return
    if len(value) > _LONGEST_LIST:
        raise RuntimeError(
            f"CommLog: {call.name} was given more than {_LONGEST_LIST} tensors, of which "
            "torch's trace keeps only the first; use a smaller world, or one output tensor"
        )
    for item in value:
        yield from _tensors(item, call)


def _dtype(written: str) -> str:
    found = {_DTYPES.get(name, name) for name in re.findall(r"Tensor\(([^()]*)\)", written)}
    return found.pop() if len(found) == 1 else "mixed" if found else ""


def _group_of(call: _TraceNode, named: Sequence[_TraceNode]) -> _Group:
    """The group by the innermost enclosing call that names one, else by elimination."""
    around = [outer for outer in named if outer.encloses(call)]
    if around:
        name = max(around, key=lambda outer: outer.start).values["group_name"]
        try:
            group = distributed_c10d._resolve_process_group(name)
        except (RuntimeError, ValueError, LookupError):  # destroyed since
            return _Group(name)
        return _Group(name, group.size(), group.rank())
    if not dist.is_initialized():
        return _Group()
    existing = distributed_c10d._world.pg_names
    names, sizes, ranks = (
        set(existing.values()),
        {group.size() for group in existing},
        {group.rank() for group in existing},
    )
    return _Group(_only(names), _only(sizes), _only(ranks))


def _only(values: set[Any]) -> Any:
    return next(iter(values)) if len(values) == 1 else None
