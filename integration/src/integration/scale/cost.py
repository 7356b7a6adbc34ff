"""Predicts the time of a step from its counted work and traffic.

Note [cost model]
    A rank computes at `efficiency` of its peak FLOP/s. A collective of n ranks on m nodes uses a
    ring with n - 1 steps, an all-reduce with twice as many. Each step takes the latency of its
    link, of which m - 1 are between nodes, as in NCCL's tuning (https://github.com/NVIDIA/nccl,
    src/graph/tuning.cc); bytes are sent at the bandwidth of the slowest link. Between nodes a ring
    uses the network cards of all its ranks in a node: with k of them, k times the bandwidth of a
    card. Other groups of the node use other cards.

    Collectives along "tp" are exposed. Collectives of fully_shard overlap with the compute of the
    same layer, and are exposed as far as they take longer; those of the root are exposed. Gradients
    of a plan are reduced after backward, without overlap.
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
    """A link between ranks.

    Attributes:
        bandwidth: bytes per second of one rank, in one direction.
        latency: seconds of one step of a ring.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """A cluster; the defaults are round figures for H100s, assumed and not measured.

    Attributes:
        peak: peak FLOP/s of a rank.
        efficiency: share of the peak that compute reaches.
        node: ranks per node.
        inside: link within a node.
        between: link of a rank's network card to other nodes.
        overlap: share of a layer's compute time that can overlap with its collectives.
        memory: bytes of memory of a rank.
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
                raise ValueError(
                    f"Machine: {name}: expected a share of at most 1, got {share!r}; give another"
                )
        for name, rate in rates.items():
            if not 0 < rate < math.inf:
                raise ValueError(
                    f"Machine: {name}: expected a number above 0, got {rate!r}; give another"
                )
        for name, link in (("inside", self.inside), ("between", self.between)):
            if not 0 <= link.latency < math.inf:
                raise ValueError(
                    f"Machine: {name}.latency: expected 0 or more, got {link.latency!r};"
                    " give another"
                )


@dataclass(frozen=True)
class PredictedStepTime:
    """The predicted seconds of a step.

    Attributes:
        compute: forward and backward.
        tensor: collectives along "tp", which are exposed.
        data: other collectives, as far as they are exposed.
        hidden: other collectives, as far as they overlap; not in the total.
    """

    compute: float
    tensor: float
    data: float
    hidden: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.tensor + self.data


def collective_seconds(traffic: AxisTraffic, machine: Machine) -> float:
    """Returns the seconds of collectives along one axis, one after another."""
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
    """Returns the predicted time of a step.

    Args:
        counted: work and traffic of a step of ``counted.tokens``.
        machine: the cluster.
        tokens: tokens of a rank; FLOPs and traffic along "tp" are proportional to them.
    """
    more = 1.0 if tokens is None else tokens / counted.tokens
    parts = [(counted.root, 1, 0.0)]
    # Gradients of a plan without fully_shard are reduced after all layers.
    overlap = machine.overlap if any(axis.name == "shard" for axis in counted.axes) else 0.0
    parts += [
        (layer, times, overlap) for layer, times in zip(counted.layers, counted.times, strict=True)
    ]
    compute = tensor = data = hidden = 0.0
    for part, times, share in parts:
        spent = _part_time(part, machine, more, share)
        compute, tensor = compute + times * spent.compute, tensor + times * spent.tensor
        data, hidden = data + times * spent.data, hidden + times * spent.hidden
    return PredictedStepTime(compute, tensor, data, hidden)


def throughput(counted: CountedStep, time: PredictedStepTime, tokens: float | None = None) -> float:
    """Returns the tokens per second of all ranks."""
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
