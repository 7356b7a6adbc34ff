"""Measures an expert layer whose tokens are dispatched: bytes, processor time and overlap.

    .nox/dev/bin/python packages/plan-api/benchmarks/experts.py --json bench-results/experts.json

The layer is transformers' `MixtralExperts`, unmodified, float32, on gloo ranks of one thread each.
A step is its forward and backward, with gradients of tokens, weights and parameters. Bytes are
those that leave a rank in a step; processor time is that of a rank's process, its communication
threads included, the mean over ranks of the median over rounds.

The matrix products of a step alone, six for each expert, are measured in the same rounds: in a loop
over views of the experts, and by `torch.nn.functional.grouped_mm`; and the module alone, on rows
of a rank in their order, without a plan. No step takes less than these.

Overlap is measured with a network that the benchmark adds (`Network`): an all-to-all takes 0.2 ms
longer, and the time of its bytes at a speed at which those of a step take half as long as the step
takes without it. One of a rank begins when the last one has ended; its wait sleeps until then, and
takes no processor time. What is hidden is the share of this time in which ranks do not wait.
"""

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from plan_api import Plan, parallelize
from testkit import CommLog, run_ranks


@dataclass(frozen=True)
class Layer:
    """An expert layer.

    Attributes:
        experts: how many there are.
        choices: experts of one token.
        features: of a token.
        hidden: features of an expert.
        tokens: of each rank.
    """

    experts: int
    choices: int
    features: int
    hidden: int
    tokens: int


LAYERS = {
    "top 2 of 8": Layer(8, 2, 512, 1024, 512),  # as Mixtral's
    "top 8 of 256": Layer(256, 8, 512, 128, 512),  # as DeepSeek-V3's
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--implementation", choices=("eager", "grouped_mm"), default="grouped_mm")
    options = parser.parse_args()
    rows = []
    for ranks, name, chunks in itertools.product(options.ranks, options.layers, options.chunks):
        arguments = LAYERS[name], options.implementation, chunks, options.rounds
        found = run_ranks(measure_rank, ranks, *arguments, timeout=900)
        rows.append({"case": f"{name}, {ranks} ranks, chunks={chunks}"} | summary(found))
        print(rows[-1])
    options.json.parent.mkdir(exist_ok=True, parents=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


class Network(TorchDispatchMode):
    """Makes all-to-alls take time, in which nobody computes for them.

    Args:
        bytes_per_second: that leave a rank.

    Attributes:
        added: seconds that were added to all-to-alls.
        waited: seconds of those for which this rank waited, for the network or for other ranks.
    """

    LATENCY = 2e-4

    def __init__(self, bytes_per_second):
        super().__init__()
        self.bytes_per_second = bytes_per_second
        self.added = self.waited = self.free_at = 0.0
        self.ready_at = {}  # by storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        called_at = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            seconds = self.LATENCY + self.bytes_to_others(*args) / self.bytes_per_second
            self.free_at = max(self.free_at, time.perf_counter()) + seconds
            self.ready_at[result.untyped_storage()._cdata] = self.free_at
            self.added += seconds
        elif func is torch.ops._c10d_functional.wait_tensor.default:
            ready_at = self.ready_at.pop(result.untyped_storage()._cdata, 0.0)
            time.sleep(max(0.0, ready_at - time.perf_counter()))
            self.waited += max(0.0, ready_at - called_at)
        return result

    @staticmethod
    def bytes_to_others(rows, received, sent, group):
        others = sum(sent) - sent[dist.get_rank()]
        return others * rows[:1].numel() * rows.itemsize


class Parts:
    """What a rank's step cannot be without, for as many rows of each expert as it has.

    Args:
        layer: any.
        implementation: of the experts.
        chosen: the choices of this rank's tokens.
        mesh: of the ranks.
    """

    def __init__(self, layer, implementation, chosen, mesh):
        everywhere = DTensor.from_local(chosen, mesh, [Shard(0)]).full_tensor()
        size = layer.experts // mesh.size()
        first = mesh.get_rank() * size
        counts = torch.bincount(everywhere.flatten(), minlength=layer.experts)
        self.ends = counts[first : first + size].cumsum(0).to(torch.int32)
        rows, hidden = int(self.ends[-1]), layer.hidden
        self.x, self.out_grad = torch.randn(2, rows, layer.features)
        self.up_grad, self.gated = torch.randn(rows, 2 * hidden), torch.randn(rows, hidden)
        self.up = torch.randn(size, 2 * hidden, layer.features)
        self.down = torch.randn(size, layer.features, hidden)
        self.module = experts_of(replace(layer, experts=size), implementation)
        self.experts = torch.arange(size).repeat_interleave(counts[first : first + size])

    def module_alone(self):
        self.module.zero_grad()
        x, weights = self.x.detach(), torch.ones(len(self.x), 1)
        out = self.module(x.requires_grad_(), self.experts[:, None], weights.requires_grad_())
        out.backward(self.out_grad)

    def views(self):
        made = [torch.empty_like(one) for one in (self.up_grad, self.x, self.gated, self.x)]
        up_grad, down_grad = torch.empty_like(self.up), torch.empty_like(self.down)
        start = 0
        for at, end in enumerate(self.ends.tolist()):
            rows, up, down = slice(start, end), self.up[at], self.down[at]
            x, out_grad = self.x[rows], self.out_grad[rows]
            torch.mm(x, up.t(), out=made[0][rows])
            torch.mm(self.gated[rows], down.t(), out=made[1][rows])
            torch.mm(out_grad, down, out=made[2][rows])
            torch.mm(out_grad.t(), self.gated[rows], out=down_grad[at])
            torch.mm(self.up_grad[rows], up, out=made[3][rows])
            torch.mm(self.up_grad[rows].t(), x, out=up_grad[at])
            start = end

    def grouped_mm(self):
        grouped_mm = torch.nn.functional.grouped_mm
        grouped_mm(self.x, self.up.transpose(1, 2), offs=self.ends)
        grouped_mm(self.gated, self.down.transpose(1, 2), offs=self.ends)
        grouped_mm(self.out_grad, self.down, offs=self.ends)
        grouped_mm(self.out_grad.t(), self.gated, offs=self.ends)
        grouped_mm(self.up_grad, self.up, offs=self.ends)
        grouped_mm(self.up_grad.t(), self.x, offs=self.ends)


@dataclass(frozen=True)
class RankResult:
    """The measurements of one rank.

    Attributes:
        seconds: processor time of each round.
        view_seconds: processor time of the products alone, in a loop over views, of each round.
        grouped_seconds: the same, by grouped_mm.
        module_seconds: processor time of the module alone, of each round.
        wall_seconds: time of each round.
        network_seconds: that a `Network` added to all-to-alls, of each round.
        overlapped_seconds: time of each round with a `Network`.
        hidden: the share of the network's time that was hidden, of each round.
        collectives: of a step, by kind.
        bytes_sent: of a step to other ranks, by collective in order.
    """

    seconds: list[float]
    view_seconds: list[float]
    grouped_seconds: list[float]
    module_seconds: list[float]
    wall_seconds: list[float]
    network_seconds: list[float]
    overlapped_seconds: list[float]
    hidden: list[float]
    collectives: Counter[str]
    bytes_sent: list[int]


def measure_rank(layer, implementation, chunks, rounds):
    """Measures steps on this rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    module = parallelize(experts_of(layer, implementation), plan_of(mesh, chunks), guard_steps=0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(layer.tokens, layer.features, generator=generator)
    scores = torch.rand(layer.tokens, layer.experts, generator=generator)
    weights, chosen = scores.softmax(-1).topk(layer.choices)
    inputs = [DTensor.from_local(one, mesh, [Shard(0)]) for one in (x, chosen, weights)]

    def step():
        module.zero_grad()
        x, chosen, weights = (one.detach() for one in inputs)
        out = module(x.requires_grad_(), chosen, weights.requires_grad_())
        out.to_local().backward(torch.ones_like(x.to_local()))

    parts = Parts(layer, implementation, chosen, mesh)
    part_seconds = {"views": [], "grouped_mm": [], "module_alone": []}
    seconds, wall_seconds = [], []
    for number in range(rounds + 1):
        for name, of_part in part_seconds.items():
            start = time.process_time()
            getattr(parts, name)()
            if number:
                of_part.append(time.process_time() - start)
        dist.barrier()
        start = time.process_time(), time.perf_counter()
        step()
        if number:  # the first round warms up
            seconds.append(time.process_time() - start[0])
            wall_seconds.append(time.perf_counter() - start[1])
    with CommLog() as log:
        step()
    sent = sum(one.wire_bytes for one in log.calls)
    slowest = torch.tensor(sent / (statistics.median(wall_seconds) / 2))
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    overlapped_seconds, hidden, network_seconds = [], [], []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        with Network(slowest.item()) as network:
            step()
        overlapped_seconds.append(time.perf_counter() - start)
        network_seconds.append(network.added)
        hidden.append(1 - network.waited / network.added)
    return RankResult(
        seconds,
        *part_seconds.values(),
        wall_seconds,
        network_seconds,
        overlapped_seconds,
        hidden,
        Counter(one.op for one in log.calls),
        [one.wire_bytes for one in log.calls],
    )


def experts_of(layer, implementation):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        hidden_size=layer.features,
        intermediate_size=layer.hidden,
        num_local_experts=layer.experts,
        experts_implementation=implementation,
    )
    torch.manual_seed(0)
    module = MixtralExperts(config)
    for param in module.parameters():
        nn.init.normal_(param, std=0.02)
    return module


def plan_of(mesh, chunks=1):
    rows = Shard(0)
    plan = Plan(mesh).shard(".*_proj", rows, "ep").local("", rows, "ep")
    for argument in ("hidden_states", "top_k_index", "top_k_weights"):
        plan.shard(f"<in:{argument}>", rows, "ep")
    options = {"weights": "top_k_weights", "count": "num_experts"}
    options |= {"chunks": chunks} if chunks > 1 else {}
    return plan.dispatch("<in:top_k_index>", rows, "ep", **options)


def summary(ranks):
    def mean(name):
        return statistics.mean(statistics.median(getattr(one, name)) for one in ranks)

    return {
        "processor_ms": round(1e3 * mean("seconds"), 1),
        "products_ms": round(1e3 * mean("view_seconds"), 1),
        "products_by_grouped_mm_ms": round(1e3 * mean("grouped_seconds"), 1),
        "module_alone_ms": round(1e3 * mean("module_seconds"), 1),
        "step_ms": round(1e3 * mean("wall_seconds"), 1),
        "network_ms": round(1e3 * mean("network_seconds"), 1),
        "step_with_network_ms": round(1e3 * mean("overlapped_seconds"), 1),
        "hidden": round(mean("hidden"), 2),
        "collectives": dict(ranks[0].collectives),
        "mean_bytes_sent": [
            round(statistics.mean(sizes))
            for sizes in zip(*(one.bytes_sent for one in ranks), strict=True)
        ],
    }


if __name__ == "__main__":
    main()
