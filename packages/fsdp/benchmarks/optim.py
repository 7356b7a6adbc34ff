"""Times steps of Adam8bit, AdamW and torch's fused AdamW, and clipping by fsdp and by torch.

`nox -s bench -- fsdp --optim` runs it. All update the same fsdp-sharded parameters with the same
gradients, of a backward, in turns, on 2 and 4 gloo ranks of one thread. torchao's AdamW8bit, if it
is installed, updates parameters of FSDP2 in the first four rounds only. Ranks share this machine's
cores, so times are the least processor time of a rank over all rounds, and ratios matter more than
times.
"""

import importlib.util
import os
import socket
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from models import build
from torch.distributed.tensor import DTensor

ROUNDS, BASE, CLIP_BASE = 15, "fused AdamW", "clipping, torch"


def rows(names, worlds=(2, 4)):
    """Returns a row for each model, number of ranks and optimizer."""
    found = []
    for name in names:
        for world in worlds:
            ranks = _on_ranks(world, name)
            for optimizer in ranks[0]:
                base_name = CLIP_BASE if optimizer.startswith("clipping") else BASE
                base = _summary([rank[base_name] for rank in ranks])
                summary = _summary([rank[optimizer] for rank in ranks])
                found.append(
                    {
                        "case": f"{name}, {world} ranks: {optimizer}",
                        "step ms": summary["ms"],
                        "step ratio": summary["ms"] / base["ms"],
                        "median ratio": summary["median"] / base["median"],
                        "state MB": summary["bytes"] / 2**20,
                        "state ratio": summary["bytes"] / (base["bytes"] or 1),
                    }
                )
                print(found[-1], flush=True)
    return found


def _summary(ranks):
    return {key: mean(rank[key] for rank in ranks) for key in ranks[0]}


def _on_ranks(world, name):
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool:
        ranks = [pool.submit(_rank, rank, world, port, name) for rank in range(world)]
        return [rank.result() for rank in ranks]


def _rank(rank, world, port, name):
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        return _measure(*_steps(name))
    finally:
        dist.destroy_process_group()


def _steps(name):
    """Returns the optimizers, and functions that clip, by name."""
    import fsdp
    from fsdp.optim import Adam8bit, AdamW

    params = _sharded(fsdp, name, shard_placement_fn=lambda param: fsdp.Block(256))
    found = {
        BASE: torch.optim.AdamW(params, lr=1e-4, fused=True),
        "AdamW": AdamW(params, lr=1e-4),
        "Adam8bit": Adam8bit(params, lr=1e-4, weight_decay=1e-2),
    }
    if importlib.util.find_spec("torchao") is not None:
        from torchao.optim import AdamW8bit

        found["torchao's AdamW8bit, FSDP2"] = AdamW8bit(_sharded(torch_fsdp, name), lr=1e-4)
    clips = {
        CLIP_BASE: lambda: torch.nn.utils.clip_grad_norm_(params, 1e6),
        "clipping": lambda: fsdp.clip_grad_norm_(params, 1e6),
    }
    return found, clips


def _sharded(package, name, **options):
    model = build(name)
    for layer in model.model.layers:
        package.fully_shard(layer, **options)
    package.fully_shard(model, **options)
    torch.manual_seed(0)
    ids = torch.randint(0, 2048, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    return list(model.parameters())


def _measure(optimizers, clips):
    steps = {name: optimizer.step for name, optimizer in optimizers.items()} | clips
    times = {name: [] for name in steps}
    for number in range(ROUNDS):
        for name, step in steps.items():
            if "torchao" in name and number >= 4:  # takes about thirty times as long
                continue
            dist.barrier()
            start = time.process_time()
            step()
            times[name].append(1e3 * (time.process_time() - start))
    return {
        name: {
            "ms": min(times[name][1:]),
            "median": median(times[name][1:]),
            "bytes": sum(map(_bytes, optimizers[name].state.values())) if name in optimizers else 0,
        }
        for name in steps
    }


def _bytes(state):
    """Returns the bytes of this rank's state, without the step count."""
    total = 0
    for key, value in state.items():
        if key == "step":
            continue
        local = value.to_local() if isinstance(value, DTensor) else value
        parts = [local] if type(local) is torch.Tensor else [local.codes, local.scale]
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


if __name__ == "__main__":
    rows(["LLaMA 6 M"])
