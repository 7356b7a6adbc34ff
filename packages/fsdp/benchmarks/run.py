"""What `nox -s bench -- fsdp` runs: steps of Hugging Face models under DDP, FSDP1, FSDP2 and fsdp.

All ways in one run, in turns, each in processes of its own, for the peak of their memory: 2 gloo
ranks of one thread, or NCCL ranks where there are GPUs. A step is forward, backward, and AdamW with
torch's defaults for all: on a CPU a loop over parameters, which on DTensors are FSDP2's and fsdp's.
Each rank has its own batch, of equal size in all ways, "alone" too. Ranks share this machine's
cores, so ratios are what counts; time of the CPU, which others on the machine disturb least, is
shown beside.
"""

import argparse
import json
import socket
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median

import optim
import torch
from models import LENGTH, MODELS
from train import train
from ways import WAYS, left_out

RANKS, ROUNDS, BASE = 2, 3, "FSDP2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--models", type=_names(MODELS), default=["LLaMA 6 M", "Mixtral 6 M"])
    parser.add_argument("--ways", type=_names(WAYS), default=list(WAYS), help="FSDP2 is always one")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", help="cpu, cuda or sim; by default cuda where there is one")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    parser.add_argument("--optim", action="store_true", help="steps of optimizers alone: optim.py")
    options = parser.parse_args()
    if options.optim:
        options.json.write_text(json.dumps(optim.rows(options.models), indent=1) + "\n")
        return
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    without = left_out(device)
    for way in without.keys() & set(options.ways):
        print(f"{way}: left out, {without[way]}", flush=True)
    ways = [way for way in WAYS if way in {*options.ways, BASE} - without.keys()]
    rows = []
    for name in options.models:
        found = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in ways:
                found[way].append(_measure(way, name, device, options.length))
        summaries = {way: _summary(measured) for way, measured in found.items()}
        for way, summary in summaries.items():
            first = found[way][0][0]
            rows.append(_row(f"{name}: {way}", summary, summaries[BASE], first, device))
            print(rows[-1], flush=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


def _names(known):
    def parse(text):
        names = list(known) if text == "all" else [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"expected all, or some of {list(known)}, got {unknown}"
            )
        return names

    return parse


def _measure(way, name, device, length):
    """What each rank found, in fresh processes."""
    world = min(RANKS, torch.cuda.device_count()) if device == "cuda" else RANKS
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool:
        given = (world, port, way, name, device, length)
        ranks = [pool.submit(train, rank, *given) for rank in range(world)]
        return [rank.result() for rank in ranks]


def _summary(rounds):
    """Of rounds of ranks: times are rank 0's best, memory is the median of the means of ranks."""
    return {
        "ms": min(ranks[0].ms for ranks in rounds),
        "launch": min(ranks[0].launch_ms for ranks in rounds),
        "cpu": min(ranks[0].cpu_ms for ranks in rounds),
        "memory": median(mean(rank.memory for rank in ranks) for ranks in rounds),
        "live": median(mean(rank.live for rank in ranks) for ranks in rounds),
    }


def _row(case, found, base, first, device):
    """A row of the table; of `first` what does not vary."""
    on_device = device != "cpu"
    memory = "reserved" if on_device else "peak RSS"
    logical = first.logical or dict.fromkeys(("groups", "gathers", "reduce-scatters"), "")
    row = {
        "case": case,
        "M parameters": round(first.parameters / 1e6, 1),
        "ms": round(found["ms"], 1),
        "this / FSDP2": round(found["ms"] / base["ms"], 2),
        "CPU ms of a rank": round(found["cpu"], 1),
        "CPU / FSDP2's": round(found["cpu"] / base["cpu"], 2),
        f"{memory}, MB": round(found["memory"]),
        f"{memory} / FSDP2's": round(found["memory"] / base["memory"], 2),
        "live tensors' peak, MB": round(found["live"], 1),
        "live / FSDP2's": round(found["live"] / base["live"], 2),
        **logical,
        "calls": ", ".join(f"{count} {op}" for op, count in sorted(first.calls.items())) or "none",
        "loss": first.loss,
    }
    if on_device:
        row["CPU ms until launched"] = round(found["launch"], 1)
        row |= {"launches": first.launches, "copy kernels": first.copies}
    return row


if __name__ == "__main__":
    main()
