"""What a plan with fully_shard costs beside `fsdp.fully_shard` alone: processor time of a step.

LLaMA on 2 gloo ranks, all in the same processes and in turns, so that the patches of a plan are in
effect for all. Under a plan each rank gets the batches of both, and shards them.
"""

import argparse
import gc
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from plan_api import parallelize, zoo
from testkit import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "fsdp" / "benchmarks"))
from models import MODELS, batches, build

KINDS = ("fsdp", "eager", "static")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="LLaMA 82 M")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    found, _ = run_ranks(_rank, 2, options.model, options.rounds, timeout=3600)
    times, calls = found
    alone = times["fsdp"]
    for kind, of_kind in times.items():
        least, middle = min(of_kind) / min(alone), statistics.median(of_kind)
        print(
            f"{kind}: least {min(of_kind):.0f} ms, {least:.3f}; median {middle:.0f} ms, "
            f"{middle / statistics.median(alone):.3f}; {calls[kind]} calls in Python"
        )


def _rank(name, rounds):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    steps = {kind: _step(kind, name, mesh) for kind in KINDS}
    for step in steps.values():
        for _ in range(3):
            step()
    gc.collect()
    gc.disable()
    calls = {kind: _python_calls(step) for kind, step in steps.items()}
    times = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, step in steps.items():
            dist.barrier()
            start = time.process_time()
            step()
            times[kind].append(1e3 * (time.process_time() - start))
    return times, calls


def _step(kind, name, mesh):
    model, own = build(name), batches(name, dist.get_rank(), torch.device("cpu"))
    if kind == "fsdp":
        for module in (*model.model.layers, model):
            fsdp.fully_shard(module, mesh=mesh)
        batch = own[0]
    else:
        plan = zoo.llama(mesh, dp="dp", tp=None)
        plan.fully_shard(r"model\.layers\.\d+", "dp").fully_shard("", "dp")
        guard = {"guard_steps": 0} if kind == "static" else {}
        model = parallelize(model, plan, mode=kind, **guard)
        batch = torch.cat([batches(name, rank, torch.device("cpu"))[0] for rank in range(2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _python_calls(step):
    """How many functions are called from Python in a step."""
    counts = Counter()
    sys.setprofile(lambda frame, event, argument: counts.update([event]))
    step()
    sys.setprofile(None)
    return counts["call"] + counts["c_call"]


if __name__ == "__main__":
    main()
