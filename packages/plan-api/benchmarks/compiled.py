"""Step times of LLaMA's layers under a plan, uncompiled and compiled by each backend.

A step is forward, loss, backward, a fused AdamW and zero_grad, on 2 gloo ranks. All variants of a
case run in the same processes and in turns; their losses are compared before anything is timed.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from plan_api import parallelize, zoo
from testkit import models, run_ranks

LAYER = r"model\.layers\.\d+"
CASES = ("TP + SP", "fully_shard")
BACKENDS = ("uncompiled", "aot_eager", "inductor")
WITHIN = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, nargs="+", default=CASES)
    parser.add_argument("--backends", choices=BACKENDS, nargs="+", default=BACKENDS)
    parser.add_argument("--hidden", type=int, default=256, help="features of a token")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="of each of 4 sequences")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    rows = []
    for case in options.case:
        rows += run_ranks(_rank, 2, case, vars(options), timeout=3600)[0]
    for row in rows:
        print(
            f"{row['case']}, {row['mode']}, {row['backend']}: median {row['median_ms']} ms, least "
            f"{row['least_ms']} ms, first step {row['first_s']} s"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def _rank(case, options):
    torch.set_num_threads(1)
    variants = [(mode, backend) for mode in ("eager", "static") for backend in options["backends"]]
    steps, first, losses = {}, {}, {}
    for variant in variants:
        steps[variant] = _step(case, *variant, options)
        start = time.perf_counter()
        losses[variant] = [steps[variant]() for _ in range(3)]
        first[variant] = time.perf_counter() - start
    for found in losses.values():
        torch.testing.assert_close(found, losses[variants[0]], rtol=0, atol=WITHIN)
    gc.collect()
    gc.disable()
    times = {variant: [] for variant in variants}
    for _ in range(options["rounds"]):
        for variant, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            times[variant].append(1e3 * (time.perf_counter() - start))
    gc.enable()
    return [
        {
            "case": case,
            "mode": mode,
            "backend": backend,
            "median_ms": round(statistics.median(times[mode, backend]), 1),
            "least_ms": round(min(times[mode, backend]), 1),
            "first_s": round(first[mode, backend], 1),
        }
        for mode, backend in variants
    ]


def _step(case, mode, backend, options):
    """Returns a function that makes one step and returns its loss."""
    shape = (1, 2) if case == "TP + SP" else (2, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = models.llama(
        hidden_size=options["hidden"], intermediate_size=3 * options["hidden"],
        num_hidden_layers=options["layers"], num_attention_heads=8, num_key_value_heads=4,
        attn_implementation="sdpa",
    )  # fmt: skip
    plan = zoo.llama(mesh, dp="dp", sp=shape[1] > 1)
    if case == "fully_shard":
        plan.fully_shard(LAYER, "dp").fully_shard("", "dp")
    if backend != "uncompiled":
        plan.compile(LAYER, backend)
    model = parallelize(model, plan, mode=mode, guard_steps=0 if mode == "static" else None)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randint(64, (4, options["tokens"]), generator=torch.Generator().manual_seed(0))

    def step():
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    return step


if __name__ == "__main__":
    main()
