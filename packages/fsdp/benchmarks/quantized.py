"""Quantized weights against plain ones: bytes gathered, and steps of 2 gloo ranks.

    python packages/fsdp/benchmarks/quantized.py [--models="LLaMA 6 M"] [--rounds=9] [--json=FILE]
    python packages/fsdp/benchmarks/quantized.py --plans

Ways take turns, step by step, in the same processes of one thread; a ratio is the median of those
of the rounds, each against the plain step of its round. Bytes are those that a rank sends in a
step. With --plans, bytes of a layer of LLaMA 3 8B on more ranks, from plans alone.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from models import batches, build
from owners import HIDDEN, LAYER

from fsdp import Tiles, fully_shard
from fsdp.quantized.byte_layout import ParamFormat, byte_layout_of
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import CommLog, run_ranks

PLAIN = "plain"
WAYS = {PLAIN: None, "int8": Tiles(torch.int8), "float8_e4m3fn": Tiles(torch.float8_e4m3fn)}


class Training:
    """One way: all matrices quantized, those of embeddings and head, too."""

    def __init__(self, name, tiles):
        self.model = build(name)
        options = {
            "quantize_fn": lambda param: tiles if param.ndim >= 2 else None,
            "strategy": "native",  # whose bytes CommLog counts
        }
        for layer in self.model.model.layers:
            fully_shard(layer, **options)
        fully_shard(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data = batches(name, dist.get_rank(), torch.device("cpu"))

    def step(self, number):
        ids = self.data[number % len(self.data)]
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def measure(name, rounds):
    torch.set_num_threads(1)
    trainings = {way: Training(name, tiles) for way, tiles in WAYS.items()}
    found = {way: {"wall": [], "cpu": []} for way in WAYS}
    for way, training in trainings.items():
        training.step(0)
        with CommLog() as log:
            training.step(1)
        found[way]["gathered"] = log.wire_bytes("all_gather")
        found[way]["reduced"] = log.wire_bytes("reduce_scatter")
        found[way]["calls"] = log.counts()
    for number in range(rounds):
        for way, training in trainings.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            found[way]["loss"] = training.step(number)
            found[way]["cpu"].append(time.process_time() - cpu)
            dist.barrier()
            found[way]["wall"].append(time.perf_counter() - wall)
    return found


def steps(name, rounds):
    found = run_ranks(measure, 2, name, rounds, timeout=1200)[0]
    for way, one in found.items():
        row = {"model": name, "way": way}
        for key in ("gathered", "reduced"):
            row[f"MB {key}"] = round(one[key] / 1e6, 2)
            row[f"{key} / plain"] = round(one[key] / found[PLAIN][key], 4)
        for key in ("wall", "cpu"):
            ratios = [a / b for a, b in zip(one[key], found[PLAIN][key], strict=True)]
            row[f"{key} ms"] = round(1e3 * min(one[key]), 1)
            row[f"{key} / plain"] = round(statistics.median(ratios), 3)
        yield row | {"collectives": one["calls"], "loss": round(one["loss"], 4)}


def plans():
    """Of a layer with its norms in each group: what a gather and a reduction carry."""
    tiles, shapes = Tiles(), [*LAYER, (HIDDEN,), (HIDDEN,)]
    for ranks in (2, 4, 8, 16, 64):
        layouts = []
        for cut in (False, True):
            blocks = [1 if cut or len(shape) == 1 else tiles.block(shape) for shape in shapes]
            specs = [
                TensorSpec(str(n), math.prod(shape), block, shape)
                for n, (shape, block) in enumerate(zip(shapes, blocks, strict=True))
            ]
            layouts.append(plan_layout(specs, ranks, alignment=8, order="best"))
        quantized, plain = layouts
        forms = [
            ParamFormat(torch.float32, shape, tiles if len(shape) > 1 else None) for shape in shapes
        ]
        sent = byte_layout_of(quantized, forms).layout.buffer_size
        yield {
            "ranks": ranks,
            "gathered / plain fp32": round(sent / (4 * plain.buffer_size), 4),
            "reduced / plain": round(quantized.buffer_size / plain.buffer_size, 4),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="LLaMA 6 M")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plans", action="store_true", help="bytes at full size, from plans")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    rows = []
    found = [plans()] if options.plans else (
        steps(name, options.rounds) for name in options.models.split(",")
    )  # fmt: skip
    for row in (row for part in found for row in part):
        rows.append(row)
        print(row, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
