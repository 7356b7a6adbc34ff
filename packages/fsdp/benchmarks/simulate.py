"""Compares simulations with real steps: memory, and time from the profile of another model.

    python packages/fsdp/benchmarks/simulate.py [--ranks=2,4] [--rounds=3]

Each round probes the machine with one model, and then measures steps of all models, on gloo ranks
of one thread. The time of a model is predicted from the profile of the probed model only. Ratios
are predicted over measured values; for times the median over rounds.
"""

import argparse
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from models import BATCH, LENGTH, MODELS, batches, build
from simulated_scale import print_scale

from testkit import run_ranks

PROBED = "LLaMA 6 M"
UNITS, STEPS = r"model\.layers\.\d+", 12


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="measure processor time, not wall time")
    parser.add_argument("--probed", default=PROBED, choices=list(MODELS))
    parser.add_argument("--models", default="LLaMA 6 M,LLaMA 15 M,Mixtral 6 M,Mixtral 13 M")
    parser.add_argument(
        "--scale", action="store_true", help="simulate LLaMA 3 70B on 8 to 8,192 ranks"
    )
    parser.add_argument("--picture", help="with --scale, the path of its SVG")
    options = parser.parse_args()
    if options.scale:
        print_scale(options.picture)
        return
    for ranks in map(int, options.ranks.split(",")):
        rounds = [
            run_ranks(
                _rank, ranks, options.probed, options.models.split(","), options.cpu, timeout=570
            )[0]
            for _ in range(options.rounds)
        ]
        for name in rounds[0]:
            rows = [found[name] for found in rounds]
            ratios = [row["predicted"] / row["measured"] for row in rows]
            print(
                f"{ranks} ranks, {name}: step {1e3 * rows[0]['measured']:.0f} ms, predicted / "
                f"measured {statistics.median(ratios):.2f} "
                f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}); peak of memory "
                f"{rows[0]['peak']:.3f}; first round: {rows[0]['parts']}",
                flush=True,
            )
        print(f"{ranks} ranks: {rounds[0][next(iter(rounds[0]))]['fits']}", flush=True)


def _rank(probed, names, cpu):
    from fsdp.simulate import probe, simulate

    warnings.simplefilter("ignore")
    found = probe(
        build(probed),
        _forward(probed),
        units=UNITS,
        clock=time.process_time if cpu else time.perf_counter,
    )
    rows = {}
    for name in names:
        model = build(name)
        simulation = simulate(
            model, mesh=dist.get_world_size(), units=UNITS, forward=_forward(name),
            constants=found.constants, exchange=True,
        )  # fmt: skip
        measured, peak = _measured(model, name, cpu)
        memory, spent = simulation.memory, simulation.time
        transient = memory.peak - memory.parameters - memory.optimizer - memory.buffers
        rows[name] = {
            "predicted": spent.total,
            "measured": measured,
            "peak": transient / peak,
            "parts": ", ".join(
                f"{part} {1e3 * getattr(spent, part):.1f}"
                for part in ("compute", "gather", "reduce", "update", "other")
            ),
            "fits": f"gather within {found.gather.error:.2f}, reduce {found.reduce.error:.2f}, "
            f"update {found.update.error:.2f}; {found.constants}",
        }
    return rows


def _forward(name):
    def forward(model):
        torch.manual_seed(0)
        ids = torch.randint(0, MODELS[name]["vocab_size"], (BATCH, LENGTH))
        return model(input_ids=ids, labels=ids).loss

    return forward


def _measured(model, name, cpu):
    """Returns the seconds of a step, and its peak memory above that between steps."""
    import fsdp
    from testkit.inspection.memory import peak_bytes

    for layer in model.model.layers:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(name, dist.get_rank(), "cpu")

    def step(number=0):
        ids = data[number % len(data)]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    clock, times = time.process_time if cpu else time.perf_counter, []
    for number in range(STEPS + 3):
        dist.barrier()
        start = clock()
        step(number)
        times.append(clock() - start)
    return statistics.median(times[3:]), peak_bytes(step)[0]


if __name__ == "__main__":
    main()
