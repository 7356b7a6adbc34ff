"""What a plan with fully_shard costs beside `fsdp.fully_shard` alone: processor time of a step.

LLaMA, all kinds in the same processes and in turns, so that the patches of a plan are in effect for
all. Under a plan each rank gets the batches of both, and shards them. Two measurements:

- On 2 gloo ranks: processor time of rank 0, which includes gloo's threads and is affected by other
  load on the machine.
- On one process of a fake mesh, where collectives send nothing: the sum over all functions of the
  least time that each took in any step. Other load affects it little, as no function is slow in
  every step; the profiler makes calls in Python, of which a plan has more, slower than they are.

The C library's heap keeps what is freed. Otherwise the page faults of a step depend on what lies
behind its tensors in the heap, that is on which model was made first, and are up to a tenth of it.
"""

import argparse
import cProfile
import ctypes
import gc
import pstats
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp.optim import Adam8bit, AdamW
from plan_api import parallelize, zoo
from testkit import fake_mesh, run_ranks

sys.path.append(str(Path(__file__).parents[2] / "fsdp" / "benchmarks"))
from models import MODELS, batches, build

KINDS = ("fsdp", "eager", "static")
ROWS = 32  # that Adam8bit's blocks of 256 do not split
OPTIMIZERS = {
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-3),
    "Adam8bit": lambda model: Adam8bit(model.named_parameters(), lr=1e-3),
}
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt, in malloc.h of glibc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="LLaMA 82 M")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW")
    parser.add_argument("--clip", action="store_true", help="clip gradients in each step")
    parser.add_argument("--only", choices=("ranks", "fake mesh"), help="one of the measurements")
    options = parser.parse_args()
    arguments = options.model, options.rounds, options.optimizer, options.clip
    if options.only != "fake mesh":
        times, _ = run_ranks(_rank, 2, *arguments, timeout=3600)
        for part in ("step", "optimizer"):
            for kind in KINDS:
                print(f"2 ranks, {part}, {kind}: {_ratios(times, part, kind)}")
    if options.only != "ranks":
        least = _least_parts(*arguments)
        for kind, ms in least.items():
            print(f"fake mesh, {kind}: {ms:.1f} ms, {ms / least['fsdp']:.3f}")


def _ratios(times, part, kind):
    own, alone = times[part, kind], times[part, "fsdp"]
    middle = statistics.median(own)
    return (
        f"least {min(own):.1f} ms, {min(own) / min(alone):.3f}; "
        f"median {middle:.1f} ms, {middle / statistics.median(alone):.3f}"
    )


def _rank(name, rounds, optimizer, clip):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    steps = _steps(name, mesh, optimizer, clip)
    times = {(part, kind): [] for part in ("step", "optimizer") for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS[:: 1 if number % 2 else -1]:
            dist.barrier()
            start = time.process_time()
            of_optimizer = steps[kind]()
            times["step", kind].append(1e3 * (time.process_time() - start))
            times["optimizer", kind].append(of_optimizer)
    return times


def _least_parts(name, rounds, optimizer, clip):
    """Returns the sum of the least times of all functions, in ms, of each kind."""
    least = {kind: {} for kind in KINDS}
    with fake_mesh((2,), ("dp",)) as mesh:
        steps = _steps(name, mesh, optimizer, clip)
        for _ in range(rounds):
            for kind, step in steps.items():
                profiler = cProfile.Profile(time.process_time)
                profiler.runcall(step)
                for function, found in pstats.Stats(profiler).stats.items():
                    before = least[kind].get(function, float("inf"))
                    least[kind][function] = min(before, 1e3 * found[2])
    return {kind: sum(of_kind.values()) for kind, of_kind in least.items()}


def _steps(name, mesh, optimizer, clip):
    """Returns the steps of all kinds, which have run three times."""
    torch.set_num_threads(1)
    heap = ctypes.CDLL(None)
    assert heap.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    assert heap.mallopt(_M_MMAP_MAX, 0)
    steps = {kind: _step(kind, name, mesh, optimizer, clip) for kind in KINDS}
    for step in steps.values():
        for _ in range(3):
            step()
    gc.collect()
    gc.disable()
    return steps


def _step(kind, name, mesh, optimizer_name, clip):
    model, own = build(name), batches(name, dist.get_rank(), torch.device("cpu"))
    if kind == "fsdp":
        rows = fsdp.Rows(ROWS) if optimizer_name == "Adam8bit" else None
        for module in (*model.model.layers, model):
            fsdp.fully_shard(
                module, mesh=mesh, shard_placement_fn=lambda p: rows if p.ndim == 2 else None
            )
        batch = own[0]
    else:
        rows = {"granularity": f"rows({ROWS})"} if optimizer_name == "Adam8bit" else {}
        plan = zoo.llama(mesh, dp="dp", tp=None)
        plan.fully_shard(r"model\.layers\.\d+", "dp", **rows).fully_shard("", "dp", **rows)
        guard = {"guard_steps": 0} if kind == "static" else {}
        model = parallelize(model, plan, mode=kind, **guard)
        batch = torch.cat([batches(name, rank, torch.device("cpu"))[0] for rank in range(2)])
    optimizer = OPTIMIZERS[optimizer_name](model)

    def step():
        """Returns the processor time of clipping and the optimizer, in ms."""
        model(input_ids=batch, labels=batch).loss.backward()
        start = time.process_time()
        if clip:
            fsdp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        spent = 1e3 * (time.process_time() - start)
        optimizer.zero_grad()
        return spent

    return step


if __name__ == "__main__":
    main()
