"""What `nox -s bench -- dbuffer` runs: one buffer of a LLaMA block, and FSDP2's way, on 2 ranks.

Milliseconds of the wall clock, the median of repeats, all ways in one run and in turns. Ranks
share this machine's cores, so ratios are what counts. Page faults are those of the median call:
memory that was returned to the system and is new again, which costs more than a copy.

FSDP2's way is that of torch's `_fsdp_collectives.py`: shards are copied into a flat buffer,
gathered, and copied out into parameters by `split_with_sizes_copy`; gradients are chunked and
copied in row by row.
"""

import argparse
import json
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median_low

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.tensor import Partial, Replicate, Shard

from dbuffer import DBuffer, MemoryPool, memory_size
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import CommLog, run_ranks

RANKS, REPEATS = 2, 25


def block(width):
    """Shapes of a LLaMA block: attention, a gated MLP, two norms."""
    hidden = 11 * width // 4
    found = {f"attention.{n}": (width, width) for n in "qkvo"}
    found |= {"mlp.gate": (hidden, width), "mlp.up": (hidden, width), "mlp.down": (width, hidden)}
    return found | {"norm1": (width,), "norm2": (width,)}


small = {f"t{i}": (16, 16) for i in range(400)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    options = parser.parse_args()
    rows = [
        row
        for part in (gathers, reductions, operators)
        for shapes in ((small, block(768)) if part is operators else (block(128), block(768)))
        for row in run_ranks(part, RANKS, shapes, timeout=300)[0]
    ]
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


def timed(ways):
    """Milliseconds and page faults of each way's calls, with all ranks at the start of each."""
    calls = {name: [] for name in ways}
    for repeat in range(REPEATS + 2):
        for name, way in ways.items():
            dist.barrier()
            before, start = getrusage(RUSAGE_SELF).ru_minflt, time.perf_counter()
            way()
            milliseconds = 1e3 * (time.perf_counter() - start)
            if repeat >= 2:
                calls[name].append((milliseconds, getrusage(RUSAGE_SELF).ru_minflt - before))
    return {name: median_low(found) for name, found in calls.items()}


def rows_of(case, shapes, ways):
    """A row for each way; the first is what the others are compared with."""
    nbytes = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    counts = {}
    for name, way in ways.items():
        with CommLog() as log:
            way()
        counts[name] = ", ".join(f"{n} {op}" for op, n in sorted(log.counts().items())) or "none"
    found = timed(ways)
    first, _ = found[next(iter(ways))]
    return [
        {
            "case": f"{case}, {len(shapes)} tensors, {nbytes / 2**20:.1f} MB: {name}",
            "ms": round(ms, 3),
            "first / this": round(first / ms, 2),
            "page faults": page_faults,
            "collectives": counts[name],
        }
        for name, (ms, page_faults) in found.items()
    ]


def planned(shapes):
    """The block's layout, rows kept whole, and what a rank has of each tensor under Shard(0)."""
    specs = [
        TensorSpec(n, torch.Size(s).numel(), s[-1] if len(s) > 1 else 1, s)
        for n, s in shapes.items()
    ]
    layout = plan_layout(specs, RANKS, alignment=4)
    assert all(shape[0] % RANKS == 0 for shape in shapes.values())  # no padding for FSDP2
    return layout, init_device_mesh("cpu", (RANKS,))


def gathers(shapes):
    """From fp32 shards to parameters, their memory allocated and freed."""
    layout, mesh = planned(shapes)
    small = DBuffer(layout, mesh, [Shard(0)], torch.float32)
    small.copy_from([torch.randn(shape) for shape in shapes.values()])
    memory = MemoryPool("cpu").take(memory_size(layout, torch.float32, full=True))
    ways = {"FSDP2's copies, native": copied_gather(shapes, "native")}
    ways["FSDP2's copies, exchange"] = copied_gather(shapes, "exchange")
    for name, strategy, given in (
        ("DBuffer, native", "native", None),
        ("DBuffer, exchange", "exchange", None),
        ("DBuffer, exchange, pool", "exchange", memory),
    ):
        full = DBuffer(
            layout, mesh, [Shard(0)], torch.float32, full=True, memory=given, strategy=strategy
        )
        full.release()

        def way(full=full):
            full.acquire()
            full.all_gather_(small)
            full.release()

        ways[name] = way
    return rows_of("gather", shapes, ways)


def collectives_of(strategy):
    """The same collectives for both sides."""
    from dbuffer.collectives import axis_of, collectives_for

    axis = axis_of(init_device_mesh("cpu", (RANKS,)), 0)
    return axis, collectives_for(strategy, axis, torch.device("cpu"))


def copied_gather(shapes, strategy):
    """`foreach_all_gather` and `foreach_all_gather_copy_out` on the host."""
    axis, collectives = collectives_of(strategy)
    shards = [torch.randn(torch.Size(s).numel() // RANKS) for s in shapes.values()]
    sizes = [shard.numel() for shard in shards]
    outputs = [torch.empty(RANKS * size) for size in sizes]

    def way():
        flat = torch.empty(RANKS * sum(sizes))
        mine = flat.view(RANKS, -1)[axis.position]
        torch._foreach_copy_(list(mine.split(sizes)), shards)
        finish = collectives.all_gather(flat, axis, mine)
        for output in outputs:
            output.untyped_storage().resize_(output.numel() * output.itemsize)
        finish()
        out = [output.view(RANKS, -1) for output in outputs]
        torch.split_with_sizes_copy(flat.view(RANKS, -1), sizes, dim=1, out=out)
        for output in outputs:
            output.untyped_storage().resize_(0)

    return way


def reductions(shapes):
    """From gradients to the shard of their sum."""
    layout, mesh = planned(shapes)
    grads = [torch.randn(shape) for shape in shapes.values()]
    ways = {"FSDP2's copies, native": copied_reduction(grads, "native")}
    ways["FSDP2's copies, exchange"] = copied_reduction(grads, "exchange")
    memory = MemoryPool("cpu").take(memory_size(layout, torch.float32, full=True))
    for name, strategy, given, in_place in (
        ("DBuffer, native", "native", None, False),
        ("DBuffer, exchange", "exchange", None, False),
        ("DBuffer, exchange, pool", "exchange", memory, False),
        ("DBuffer, exchange, gradients in place", "exchange", None, True),
    ):
        full = DBuffer(layout, mesh, [Partial()], torch.float32, memory=given, strategy=strategy)
        if not in_place:
            full.release()

        def way(full=full, in_place=in_place):
            full.acquire()
            full.set_placements([Partial()])
            if not in_place:
                full.copy_from(grads)
            full.reduce_scatter_()
            if not in_place:
                full.release()

        ways[name] = way
    return rows_of("reduce-scatter", shapes, ways)


def copied_reduction(grads, strategy):
    """`foreach_reduce` on the host."""
    axis, collectives = collectives_of(strategy)
    total = sum(grad.numel() for grad in grads)

    def way():
        flat = torch.empty(total)
        chunks = [[] for _ in range(RANKS)]
        for grad in grads:
            for mine, chunk in zip(chunks, _chunk_with_empty(grad, RANKS, dim=0), strict=True):
                mine.append(chunk.reshape(-1))
        for row, mine in zip(flat.view(RANKS, -1), chunks, strict=True):
            torch._foreach_copy_(list(row.split([chunk.numel() for chunk in mine])), mine)
        collectives.reduce_scatter(flat, axis, average=False)()
        flat.view(RANKS, -1)[axis.position].clone()

    return way


def operators(shapes):
    """Scale, add and cast of all tensors: a kernel each, foreach over them, one for the buffer."""
    layout, mesh = planned(shapes)
    tensors = [torch.randn(shape) for shape in shapes.values()]
    halves = [tensor.bfloat16() for tensor in tensors]
    buffer, half = (
        DBuffer(layout, mesh, [Replicate()], dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    buffer.copy_from(tensors)
    half.copy_from(halves)

    def each():
        for tensor, low in zip(tensors, halves, strict=True):
            tensor.mul_(0.999)
            tensor.add_(low)
            low.copy_(tensor)

    def foreach():
        torch._foreach_mul_(tensors, 0.999)
        torch._foreach_add_(tensors, halves)
        torch._foreach_copy_(halves, tensors)

    def whole():
        buffer.scale_(0.999)
        buffer.add_(half)
        half.copy_(buffer)

    ways = {"each tensor": each, "foreach": foreach, "DBuffer": whole}
    return rows_of("scale, add, cast", shapes, ways)


if __name__ == "__main__":
    main()
