"""What `nox -s bench -- fsdp` runs: steps of an unmodified LLaMA under DDP, FSDP1, FSDP2 and ours.

All ways in one run, in turns, each in processes of its own, for the peak of their memory; 2 gloo
ranks of one thread. A step is forward, backward, AdamW. Ranks share this machine's cores, so ratios
are what counts; time of the CPU, which others on the machine disturb least, is shown beside.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.nn.parallel import DistributedDataParallel

RANKS, WARMUP, STEPS, ROUNDS = 2, 4, 20, 3
SIZES = {
    "6 M": {
        "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048,
    },
    "82 M": {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
        "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 16384,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--size", choices=SIZES, default="6 M")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    found = {name: [] for name in WAYS}
    for _ in range(options.rounds):
        for name in WAYS:
            found[name].append(_measure(name, SIZES[options.size]))
    base = min(one["ms"] for one in found["FSDP2"])
    base_cpu = min(one["cpu"] for one in found["FSDP2"])
    base_rss = statistics.median(one["rss"] for one in found["FSDP2"])
    base_live = found["FSDP2"][0]["live"]
    rows = []
    for name, measured in found.items():
        ms = min(one["ms"] for one in measured)
        rss = statistics.median(one["rss"] for one in measured)
        cpu = min(one["cpu"] for one in measured)
        rows.append(
            {
                "case": f"LLaMA of {measured[0]['parameters'] / 1e6:.1f} M, AdamW: {name}",
                "ms": round(ms, 1),
                "this / FSDP2": round(ms / base, 2),
                "CPU ms of a rank": round(cpu, 1),
                "CPU / FSDP2's": round(cpu / base_cpu, 2),
                "peak RSS, MB": round(rss),
                "RSS / FSDP2's": round(rss / base_rss, 2),
                "live tensors' peak, MB": round(measured[0]["live"]),
                "live / FSDP2's": round(measured[0]["live"] / base_live, 2),
                "loss": measured[0]["loss"],
            }
        )
        print(rows[-1], flush=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


def _composed(package, model, **options):
    for layer in model.model.layers:
        package.fully_shard(layer, **options)
    return package.fully_shard(model, **options)


def _ours(model, **options):
    import fsdp

    return _composed(fsdp, model, **options)


def _fsdp1(model):
    kind = type(model.model.layers[0])
    wrap = partial(torch_fsdp.wrap.transformer_auto_wrap_policy, transformer_layer_cls={kind})
    return torch_fsdp.FullyShardedDataParallel(
        model, auto_wrap_policy=wrap, use_orig_params=True, device_id=torch.device("cpu")
    )


WAYS = {
    "DDP": DistributedDataParallel,
    "FSDP1": _fsdp1,
    "FSDP2": partial(_composed, torch_fsdp),
    "ours, native collectives": partial(_ours, strategy="native"),
    "ours": _ours,
}


def _measure(name, size):
    """One way in fresh processes: of rank 0, but memory as the mean of ranks."""
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), _free_port()
    ranks = [
        context.Process(target=_train, args=(rank, port, name, size, results))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    found = sorted((results.get(timeout=600) for _ in ranks), key=lambda one: one["rank"])
    for process in ranks:
        process.join()
    rss = statistics.mean(one["rss"] for one in found)
    return found[0] | {"rss": rss}


def _free_port():
    import socket

    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _train(rank, port, name, size, results):
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(use_cache=False, **size))
    parameters = sum(p.numel() for p in model.parameters())
    model = WAYS[name](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    batches = [torch.randint(0, size["vocab_size"], (2, 64)) for _ in range(4)]

    def step(number):
        ids = batches[number % len(batches)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for number in range(WARMUP):
        step(number)
    times, cpu = [], time.process_time()
    for number in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        loss = step(number)
        times.append(1e3 * (time.perf_counter() - start))
    cpu = 1e3 * (time.process_time() - cpu) / STEPS
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # before the profiler's own
    results.put(
        {
            "rank": rank, "ms": statistics.median(times), "rss": rss, "parameters": parameters,
            "cpu": cpu,
            "live": _live(lambda: step(0)), "loss": loss.item(),
        }
    )  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def _live(step):
    """MB of the allocator's bytes at their peak in a step, above what it began with, plus those."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak / 2**20


if __name__ == "__main__":
    main()
