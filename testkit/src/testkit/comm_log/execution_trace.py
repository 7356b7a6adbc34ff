"""Reads collectives and products from an execution trace of torch (`ExecutionTraceObserver`).

Nodes have a schema, the values, shapes and dtypes of their arguments, and an id that is assigned
when they start; they are written when they end. Links to parents are not used: gloo ends its own
nodes on other threads, after which torch's links are wrong. The order of starts and ends is
reliable.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import flop_counter

from testkit.comm_log.collective import Collective, Op

_LONGEST_LIST = 4096  # torch truncates longer lists, after one more element


class _Kind(NamedTuple):
    """The name of a c10d operator's operation, and of its arguments with inputs and outputs."""

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
class TraceNode:
    """One node of the trace, its arguments by name.

    Attributes:
        start: its number in the order of starts.
        end: its number in the order of ends.
        thread: the id of its thread.
        name: the operator, with its namespace.
        values: of the arguments; a tensor is ``[id, storage, offset, numel, itemsize, device]``.
        types: of the arguments as torch writes them, e.g. ``"GenericList[Tensor(float)]"``.
        shapes: of the arguments in order, ``[]`` for those that are not tensors.
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
        """Whether it has an argument on the meta device, and so computes nothing."""
        tensors = (tensor for value in self.values.values() for tensor in _tensors(value, self))
        return any(tensor[5] == "meta" for tensor in tensors)

    def encloses(self, other: TraceNode) -> bool:
        """Whether ``other`` ran within it, on the same thread."""
        return self.thread == other.thread and self.start < other.start and self.end > other.end


@dataclass(frozen=True)
class _Group:
    name: str | None = None
    size: int | None = None
    rank: int | None = None


def read_collectives(calls: Sequence[TraceNode]) -> tuple[Collective, ...]:
    """Reads the collectives of a trace, in order of issue.

    Sizes and ranks of groups are those in this process, so call it while the groups exist.

    Args:
        calls: the nodes of the trace (`read_calls`).

    Raises:
        RuntimeError: an operator of c10d is unknown, or torch has truncated a list.
    """
    with_group = [call for call in calls if isinstance(call.values.get("group_name"), str)]
    collectives = [call for call in calls if call.name.startswith("c10d::")]
    return tuple(
        _read_collective(call, _group_of(call, with_group))
        for call in sorted(collectives, key=lambda call: call.start)
        if call.name.removeprefix("c10d::") not in _NO_COLLECTIVE
    )


def _sdpa_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    flops: int = flop_counter.sdpa_flop_count(query, _of_heads(query, key), _of_heads(query, value))
    return flops


def _sdpa_backward_flops(
    grad: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int]
) -> int:
    flops: int = flop_counter.sdpa_backward_flop_count(
        grad, query, _of_heads(query, key), _of_heads(query, value)
    )
    return flops


def _of_heads(query: Sequence[int], shape: Sequence[int]) -> Sequence[int]:
    """Gives keys or values the heads of the queries, as the kernel does.

    torch 2.11's FLOP counter refuses fewer heads (grouped-query attention); later ones do this.
    """
    return [shape[0], query[1], *shape[2:]]


# The functions of torch's FLOP counter, which take the shapes of an operator's first tensors.
_PRODUCTS: dict[str, Callable[..., int]] = {
    "aten::mm": flop_counter.mm_flop,
    "aten::addmm": flop_counter.addmm_flop,
    "aten::bmm": flop_counter.bmm_flop,
    "aten::baddbmm": flop_counter.baddbmm_flop,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _sdpa_flops,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_backward_flops,
}
_PRODUCT_TENSORS = {
    "aten::mm": 2, "aten::addmm": 3, "aten::bmm": 2, "aten::baddbmm": 3,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 3,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 4,
}  # fmt: skip


def read_product_flops(nodes: Sequence[TraceNode]) -> int:
    """Returns the FLOPs of the matrix products and the fused CPU attention of a trace.

    Only operators on local tensors are counted. An operator on DTensors is recorded too, with the
    global shapes, and encloses the one on local tensors. Where DTensor infers the shape of a
    result, it also encloses one on meta tensors, which computes nothing.

    Args:
        nodes: the nodes of the trace (`read_calls`).
    """
    calls = sorted(
        (node for node in nodes if node.name in _PRODUCTS),
        key=lambda call: (call.thread, call.start),
    )
    # In the order of starts, an enclosed call directly follows the call that encloses it.
    return sum(
        _PRODUCTS[call.name](*call.shapes[: _PRODUCT_TENSORS[call.name]])
        for call, following in itertools.zip_longest(calls, calls[1:])
        if not (following and call.encloses(following)) and not call.on_meta
    )


# Each node is a JSON object that begins on a line of its own, with this indentation.
_NODE = "\n      {\n"
_NAME = re.compile(r'\s*\{\s*"id": \d+, "name": "([^"]*)"')


def read_calls(trace: str) -> list[TraceNode]:
    """Reads the operators of a trace that are collectives, products, or have a process group.

    The other nodes, which are almost all, are not parsed: a trace has a megabyte per thousand.

    Args:
        trace: the text of the observer's file.

    Raises:
        RuntimeError: no nodes are found, as torch writes them in another format.
    """
    starts = [match.start() for match in re.finditer(_NODE, trace)]
    if not starts:
        raise RuntimeError(
            "CommLog: expected nodes in torch's execution trace, got none in the known format; "
            "read the format of this torch in testkit.comm_log.execution_trace"
        )
    decoder, calls = json.JSONDecoder(), []
    for end, (start, stop) in enumerate(itertools.zip_longest(starts, starts[1:])):
        name = _NAME.match(trace, start)
        if name is None or _is_read(name[1]) or trace.find("group_name", start, stop) >= 0:
            node, _ = decoder.raw_decode(trace, trace.index("{", start))
            if call := _read_call(end, node):
                calls.append(call)
    return calls


def _is_read(name: str) -> bool:
    return name.startswith("c10d::") or name in _PRODUCTS


def _read_call(end: int, node: Mapping[str, Any]) -> TraceNode | None:
    attributes = {attribute["name"]: attribute["value"] for attribute in node["attrs"]}
    schema = attributes.get("op_schema", "")
    if " -> " not in schema:  # an annotation, not an operator
        return None
    arguments = schema[schema.index("(") + 1 : schema.index(") -> ")].split(", ")
    names = [argument.split("=")[0].split()[-1] for argument in arguments if argument]
    inputs = node["inputs"]
    return TraceNode(
        start=node["id"],
        end=end,
        thread=attributes["tid"],
        name=node["name"],
        values=dict(zip(names, inputs["values"], strict=False)),  # "*" of keyword-only arguments
        types=dict(zip(names, inputs["types"], strict=False)),
        shapes=inputs["shapes"],
    )


def _read_collective(call: TraceNode, group: _Group) -> Collective:
    kind = _KINDS.get(call.name.removeprefix("c10d::"))
    if kind is None:
        raise RuntimeError(
            f"CommLog: expected a known c10d operator, got {call.name}; add it to _KINDS of "
            "testkit.comm_log.execution_trace"
        )
    inputs = call.values[kind.inputs] if kind.inputs else []
    outputs = call.values[kind.outputs] if kind.outputs else []
    size = group.size
    if kind.op == "all_to_all":
        size = size or len(call.values.get("input_split_sizes", inputs)) or None
    return Collective(
        op=kind.op,
        input_bytes=_bytes(inputs, call),
        output_bytes=_bytes(outputs, call),
        # Receivers of a scatter have no inputs, senders of a gather no outputs.
        dtype=_dtype(call.types.get(kind.inputs or "", ""))
        or _dtype(call.types.get(kind.outputs or "", "")),
        group=group.name,
        group_size=size,
        group_rank=group.rank,
        root=call.values.get("root_rank"),
        input_splits=_splits(call, "input", size) if kind.op == "all_to_all" else (),
        output_splits=_splits(call, "output", size) if kind.op == "all_to_all" else (),
    )


def _splits(call: TraceNode, side: str, size: int | None) -> tuple[int, ...]:
    """Returns an all_to_all's bytes per rank, of a tensor with split sizes, or of a list."""
    if side not in call.values:
        return tuple(_bytes([tensor], call) for tensor in call.values[f"{side}_tensors"])
    total = _bytes(call.values[side], call)
    rows = call.values[f"{side}_split_sizes"] or [1] * (size or 0)  # without sizes, splits are even
    return tuple(total * count // max(sum(rows), 1) for count in rows)


def _bytes(value: Any, call: TraceNode) -> int:
    return sum(math.prod(tensor[3:5]) for tensor in _tensors(value, call))


def _tensors(value: Any, call: TraceNode) -> Iterator[Sequence[Any]]:
    if not isinstance(value, list):
        return
    if len(value) == 6 and isinstance(value[5], str):
        yield value
        return
    if len(value) > _LONGEST_LIST:
        raise RuntimeError(
            f"CommLog: expected at most {_LONGEST_LIST} tensors in a call of {call.name}, got "
            "more, which torch's trace truncates; use a smaller world, or one output tensor"
        )
    for item in value:
        yield from _tensors(item, call)


def _dtype(types: str) -> str:
    dtypes = {_DTYPES.get(name, name) for name in re.findall(r"Tensor\(([^()]*)\)", types)}
    return dtypes.pop() if len(dtypes) == 1 else "mixed" if dtypes else ""


def _group_of(call: TraceNode, with_group: Sequence[TraceNode]) -> _Group:
    """Returns the group of the innermost enclosing call with one, else the only existing one."""
    enclosing = [outer for outer in with_group if outer.encloses(call)]
    if enclosing:
        name = max(enclosing, key=lambda outer: outer.start).values["group_name"]
        try:
            group = distributed_c10d._resolve_process_group(name)
        except (RuntimeError, ValueError, LookupError):  # it has been destroyed
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
