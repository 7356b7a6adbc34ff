"""Measures gradient reduction on gloo ranks: `nox -s bench -- fused-comm`.

Milliseconds of wall clock, the minimum of repeats, all methods in one run and in turns. Ranks share
this machine's cores, so only ratios are meaningful.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from fused_comm import GradReducer
from testkit import CommLog, run_ranks

GRADIENTS, ELEMENTS, REPEATS = 200, 64, 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    options = parser.parse_args()
    rows = [
        row
        for part, ranks in ((small_gradients, 4), (as_ddp, 2), (large_gradients, 4))
        for row in run_ranks(part, ranks, timeout=300)[0]
    ]
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


def timed(methods, prepare, repeats=REPEATS):
    """Milliseconds of each method: the minimum, with a barrier before each run."""
    best = dict.fromkeys(methods, float("inf"))
    for _ in range(repeats):
        for name, method in methods.items():
            prepare(name)
            dist.barrier()
            start = time.perf_counter()
            method()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def small_gradients():
    """200 gradients Partial on both axes of a 2 x 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2))
    partial, replicated = [Partial(), Partial()], [Replicate(), Replicate()]

    def params():
        made = (
            DTensor.from_local(torch.zeros(ELEMENTS), mesh, replicated) for _ in range(GRADIENTS)
        )
        return [torch.nn.Parameter(one) for one in made]

    sets = {name: params() for name in ("each", "per axis", "fused", "fused, zero_copy")}
    reducers = {
        "per axis": GradReducer(sets["per axis"], fuse_axes=False),
        "fused": GradReducer(sets["fused"]),
        "fused, zero_copy": GradReducer(sets["fused, zero_copy"], zero_copy=True),
    }

    def prepare(name):
        for number, param in enumerate(sets[name]):
            if name in reducers:
                reducers[name]._gradients[number].before_accumulation()
            if param.grad is None or name == "each":
                local = torch.ones(ELEMENTS)
                param.grad = DTensor.from_local(local, mesh, partial, run_check=False)

    def each():
        for param in sets["each"]:
            param.grad = param.grad.redistribute(placements=replicated)
            param.grad._local_tensor.add_(0)  # waits for it, as an optimizer does

    methods = {"each": each} | {name: reducer.finish for name, reducer in reducers.items()}
    for name, method in methods.items():  # groups, plans
        prepare(name)
        method()
    counts = {}
    for name, method in methods.items():
        prepare(name)
        with CommLog() as log:
            method()
        counts[name] = sum(log.counts().values())
    best = timed(methods, prepare)
    return [
        {
            "case": f"{GRADIENTS} gradients of {ELEMENTS}, 2 x 2: {name}",
            "ms": round(ms, 2),
            "collectives": counts[name],
            "each / this": round(best["each"] / ms, 1),
        }
        for name, ms in best.items()
    ]


def ring_bytes(nbytes, sizes, fused):
    """Bytes that a rank sends: a ring all-reduce of n ranks sends 2 (n - 1) / n of the buffer.

    The cost model of veScale, section 6.3, in which only bandwidth counts: one ring per axis, or
    one ring of all ranks.
    """
    rings = [math.prod(sizes)] if fused else sizes
    return sum(2 * (n - 1) / n * nbytes for n in rings)


def large_gradients():
    """One gradient in one bucket, Partial on both axes of 2 x 2, as in the cost model."""
    mesh = init_device_mesh("cpu", (2, 2))
    partial, replicated = [Partial(), Partial()], [Replicate(), Replicate()]
    rows = []
    for megabytes in (0.25, 4, 32):
        local = torch.ones(int(megabytes * 2**20) // 4)
        methods, params = {}, {}
        for name, fused in (("per axis", False), ("fused", True)):
            zeros = DTensor.from_local(torch.zeros_like(local), mesh, replicated)
            params[name] = torch.nn.Parameter(zeros)
            methods[name] = GradReducer([params[name]], fuse_axes=fused).finish

        def prepare(name, params=params, local=local):
            params[name].grad = DTensor.from_local(local, mesh, partial, run_check=False)

        for name, method in methods.items():
            prepare(name)
            method()
        best = timed(methods, prepare)
        sent = {name: ring_bytes(local.nbytes, (2, 2), name == "fused") for name in methods}
        rows += [
            {
                "case": f"one gradient of {megabytes} MB, 2 x 2: {name}",
                "ms": round(ms, 2),
                "sent by a rank, MB": round(sent[name] / 2**20, 2),
                "per axis / this": round(best["per axis"] / ms, 2),
                "per axis / this, by the model": round(sent["per axis"] / sent[name], 2),
            }
            for name, ms in best.items()
        ]
    return rows


def as_ddp():
    """A step of a plain model on 2 ranks: forward, backward and the reduction."""

    def model():
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(16)
        ]
        return torch.nn.Sequential(*layers)

    plain, ddp = model(), torch.nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=1)
    copyless = model()
    # Four layers a bucket, as DDP has them: it closes one when that exceeds the size.
    options = {"group": dist.group.WORLD, "bucket_mb": 1.05}
    reducers = {
        "GradReducer": (plain, GradReducer(plain.parameters(), **options)),
        "GradReducer, zero_copy": (
            copyless, GradReducer(copyless.parameters(), zero_copy=True, **options)
        ),
    }  # fmt: skip
    x = torch.randn(64, 256)

    def step(model, finish):
        model.zero_grad()
        model(x).sum().backward()
        finish()

    methods = {"DDP": lambda: step(ddp, lambda: None)}
    for name, (module, reducer) in reducers.items():
        methods[name] = lambda module=module, reducer=reducer: step(module, reducer.finish)
    for method in methods.values():
        for _ in range(3):
            method()
    counts = {}
    for name, method in methods.items():
        with CommLog() as log:
            method()
        counts[name] = sum(log.counts().values())
    best = timed(methods, lambda name: None, repeats=4 * REPEATS)
    return [
        {
            "case": f"16 layers of 256 as DDP: {name}",
            "ms": round(ms, 2),
            "collectives": counts[name],
            "this / DDP": round(ms / best["DDP"], 2),
        }
        for name, ms in best.items()
    ]


if __name__ == "__main__":
    main()
