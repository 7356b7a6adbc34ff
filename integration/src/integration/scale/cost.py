"""The time of a step, by a model with few constants; what is counted is its input.

Note: the model. A rank computes at `efficiency` of its peak. A collective of n ranks on m nodes
goes round a ring: each of its n - 1 steps, twice that of an all-reduce, takes the latency of the
link that it crosses, of which m - 1 lead to another node, as NCCL's own tuning has it
(https://github.com/NVIDIA/nccl, src/graph/tuning.cc), and bytes pass at the bandwidth of the
narrowest link. Between nodes a ring uses the network cards of all its ranks in a node, so that with
k of them there it has k times a card's bandwidth; other groups of the same node use other cards.

Collectives along "tp" are waited for. Those of fully_shard run beside what the same layer computes,
and what is longer than that is waited for; the root's have nothing beside them. Gradients that a
plan reduces are sent at the end of backward, when nothing is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from integration.scale.traffic import AxisTraffic, CountedStep, StepWork

__all__ = [
    "Machine",
    "NetworkLink",
    "PredictedStepTime",
    "collective_seconds",
    "step_time",
    "throughput",
]


@dataclass(frozen=True)
class NetworkLink:
    """How ranks reach each other.

    Attributes:
        bandwidth: bytes per second of one rank, in one direction.
        latency: seconds of a step of a ring.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """A cluster; the defaults are round figures of H100s, given and not measured.

    Attributes:
        peak: FLOP/s of a rank.
        efficiency: share of it that computing reaches.
        node: ranks of a node.
        inside: link within a node.
        between: link of a rank's own network card to other nodes.
        overlap: share of a layer's computing beside which its collectives can run.
        memory: bytes of a rank.
    """

    peak: float = 989e12
    efficiency: float = 0.5
    node: int = 8
    inside: NetworkLink = NetworkLink(360e9, 3.4e-6)
    between: NetworkLink = NetworkLink(40e9, 9.6e-6)
    overlap: float = 1.0
    memory: float = 80e9

    def __post_init__(self) -> None:
        shares = {"efficiency": self.efficiency, "overlap": self.overlap}
        rates = {
            "peak": self.peak, "inside.bandwidth": self.inside.bandwidth,
            "between.bandwidth": self.between.bandwidth, "memory": self.memory, "node": self.node,
        }  # fmt: skip
        for name, share in shares.items():
            if not 0 <= share <= 1 or (name == "efficiency" and share == 0):
                raise ValueError(f"Machine: {name} is {share!r}; wants a share, at most 1")
        for name, rate in rates.items():
            if not 0 < rate < math.inf:
                raise ValueError(f"Machine: {name} is {rate!r}; wants a number above 0")
        for name, link in (("inside", self.inside), ("between", self.between)):
            if not 0 <= link.latency < math.inf:
                raise ValueError(f"Machine: {name}.latency is {link.latency!r}; wants 0 or more")


@dataclass(frozen=True)
class PredictedStepTime:
    """Seconds of a step.

    Attributes:
        compute: of forward and backward.
        tensor: of collectives along "tp", waited for.
        data: of the others, as far as they are waited for.
        hidden: of the others, beside computing; no part of the total.
    """

    compute: float
    tensor: float
    data: float
    hidden: float

    @property
    def total(self) -> float:
        """Seconds."""
        return self.compute + self.tensor + self.data


def collective_seconds(traffic: AxisTraffic, machine: Machine) -> float:
    """Seconds of collectives along one axis, one after another."""
    axis = traffic.axis
    in_node = max(1, min(axis.size, machine.node // axis.stride))
    nodes = math.ceil(axis.size / in_node)
    rounds = 2 if traffic.op == "all_reduce" else 1
    across, within = nodes - 1, axis.size - nodes
    latency = across * machine.between.latency + within * machine.inside.latency
    bandwidth = machine.inside.bandwidth
    if nodes > 1:
        network = in_node * machine.between.bandwidth
        bandwidth = min(bandwidth, network) if in_node > 1 else network
    return traffic.calls * rounds * latency + traffic.nbytes / bandwidth


def step_time(
    counted: CountedStep, machine: Machine, tokens: float | None = None
) -> PredictedStepTime:
    """Seconds of a step.

    Args:
        counted: what a step of ``counted.tokens`` takes.
        machine: it runs on.
        tokens: of a rank's own data; FLOPs and what is sent along "tp" grow with them.
    """
    more = 1.0 if tokens is None else tokens / counted.tokens
    parts = [(counted.root, 1, 0.0)]
    # Gradients of a plan without fully_shard are reduced behind all layers.
    beside = machine.overlap if any(axis.name == "shard" for axis in counted.axes) else 0.0
    parts += [
        (layer, times, beside) for layer, times in zip(counted.layers, counted.times, strict=True)
    ]
    compute = tensor = data = hidden = 0.0
    for part, times, share in parts:
        spent = _part_time(part, machine, more, share)
        compute, tensor = compute + times * spent.compute, tensor + times * spent.tensor
        data, hidden = data + times * spent.data, hidden + times * spent.hidden
    return PredictedStepTime(compute, tensor, data, hidden)


def throughput(counted: CountedStep, time: PredictedStepTime, tokens: float | None = None) -> float:
    """Tokens per second of all ranks."""
    own = counted.tokens if tokens is None else tokens
    return own * counted.ranks / counted.sharing / time.total


def _part_time(part: StepWork, machine: Machine, more: float, beside: float) -> PredictedStepTime:
    compute = more * part.flops / (machine.peak * machine.efficiency)
    tensor = data = 0.0
    for traffic in part.traffic:
        if traffic.axis.name == "tp":
            longer = AxisTraffic(
                traffic.op, traffic.axis, traffic.calls, round(traffic.nbytes * more)
            )
            tensor += collective_seconds(longer, machine)
        else:
            data += collective_seconds(traffic, machine)
    hidden = min(data, beside * compute)
    return PredictedStepTime(compute, tensor, data - hidden, hidden)
