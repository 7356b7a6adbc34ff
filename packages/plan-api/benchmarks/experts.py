"""Measures an expert layer whose tokens are dispatched: bytes, collectives and processor time.

    .nox/dev/bin/python packages/plan-api/benchmarks/experts.py --json bench-results/experts.json

The layer is transformers' `MixtralExperts`, unmodified, float32, on gloo ranks of one thread each.
A step is its forward and backward, with gradients of tokens, weights and parameters. Bytes are
those that leave a rank in a step; processor time is that of a rank's process, its communication
threads included, the mean over ranks of the median over rounds.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

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
    parser.add_argument("--implementation", choices=("eager", "grouped_mm"), default="grouped_mm")
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        for name in options.layers:
            arguments = LAYERS[name], options.implementation, options.rounds
            found = run_ranks(measure_rank, ranks, *arguments, timeout=900)
            rows.append({"case": f"{name}, {ranks} ranks"} | summary(found))
            print(rows[-1])
    options.json.parent.mkdir(exist_ok=True, parents=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")


@dataclass(frozen=True)
class RankResult:
    """The measurements of one rank.

    Attributes:
        seconds: processor time of each round.
        collectives: of a step, by kind.
        bytes_sent: of a step to other ranks, by collective in order.
    """

    seconds: list[float]
    collectives: Counter[str]
    bytes_sent: list[int]


def measure_rank(layer, implementation, rounds):
    """Measures steps on this rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    module = parallelize(experts_of(layer, implementation), plan_of(mesh), guard_steps=0)
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

    seconds = []
    for number in range(rounds + 1):
        dist.barrier()
        start = time.process_time()
        step()
        if number:  # the first round warms up
            seconds.append(time.process_time() - start)
    with CommLog() as log:
        step()
    return RankResult(
        seconds, Counter(one.op for one in log.calls), [one.wire_bytes for one in log.calls]
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


def plan_of(mesh):
    rows = Shard(0)
    plan = Plan(mesh).shard(".*_proj", rows, "ep").local("", rows, "ep")
    for argument in ("hidden_states", "top_k_index", "top_k_weights"):
        plan.shard(f"<in:{argument}>", rows, "ep")
    options = {"weights": "top_k_weights", "count": "num_experts"}
    return plan.dispatch("<in:top_k_index>", rows, "ep", **options)


def summary(ranks):
    return {
        "processor_ms": round(
            1e3 * statistics.mean(statistics.median(one.seconds) for one in ranks), 1
        ),
        "collectives": dict(ranks[0].collectives),
        "mean_bytes_sent": [
            round(statistics.mean(sizes))
            for sizes in zip(*(one.bytes_sent for one in ranks), strict=True)
        ],
    }


if __name__ == "__main__":
    main()
