"""One rank of one way: it trains, and tells what that took."""

import os
import statistics
import time
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from measured import kernels_on_device, live_tensors, logical_collectives, peak_rss
from models import batches, build
from ways import WAYS

from testkit import CommLog, sim

WARMUP, STEPS = 4, 20


@dataclass(frozen=True)
class Measured:
    """What a rank found.

    Attributes:
        parameters: of the model.
        ms: of a step, the median; on a GPU until it has done all.
        launch_ms: of a step, until the last call has returned.
        cpu_ms: that the process computed in a step, all its threads.
        memory: peak MB: resident ones of the process, on a GPU those that the allocator reserved.
        live: peak MB of tensors in a step, above what it began with.
        calls: that reached a process group in a step, by kind.
        logical: our groups and their collectives; None of others.
        launches: kernels and copies of a step; None but on CUDA.
        copies: those that only move.
        loss: the last.
    """

    parameters: int
    ms: float
    launch_ms: float
    cpu_ms: float
    memory: float
    live: float
    calls: dict[str, int]
    logical: dict[str, int] | None
    launches: int | None
    copies: int | None
    loss: float


def train(rank, world, port, way, name, kind, length):
    """Trains a model one way, in a process that did nothing before; what it took."""
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    backend = "gloo"
    if kind == "sim":
        sim.load()
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    dist.init_process_group(backend, rank=rank, world_size=world)
    try:
        return _train(rank, way, name, torch.device(kind), length)
    finally:
        dist.destroy_process_group()  # so that the others do not wait for one that failed


def _train(rank, way, name, device, length):
    model = build(name).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    training = WAYS[way](model)
    data = batches(name, rank, device, length)

    def step(number=0):
        ids = data[number % len(data)]
        loss = training.model(input_ids=ids, labels=ids).loss
        training.backward(loss)
        training.update()
        return loss

    def synchronize():
        if device.type != "cpu":
            torch.accelerator.synchronize()

    for number in range(WARMUP):
        step(number)
    times, launches, cpu = [], [], time.process_time()
    for number in range(STEPS):
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        loss = step(number)
        launches.append(1e3 * (time.perf_counter() - start))
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    cpu = 1e3 * (time.process_time() - cpu) / STEPS
    on_device = device.type != "cpu"
    memory, live = _memory_on_device(step) if on_device else (peak_rss(), live_tensors(step))
    kernels, copies = kernels_on_device(step) if device.type == "cuda" else (None, None)
    with CommLog() as log:
        step()
    return Measured(
        parameters, statistics.median(times), statistics.median(launches), cpu, memory, live,
        log.counts(), logical_collectives(training.model, step),
        kernels, copies, loss.item(),
    )  # fmt: skip


def _memory_on_device(step):
    """MB that the allocator reserved so far, and those of tensors in a step, as `live_tensors`."""
    reserved = torch.accelerator.max_memory_reserved()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    step()
    torch.accelerator.synchronize()
    return reserved / 2**20, (torch.accelerator.max_memory_allocated() - before) / 2**20
