"""Predicts the memory of a rank and the time of a step of a candidate.

Note [composition]
    A rank has the layers of its stage and, in a pipeline, half of the root. fully_shard gathers
    parameters in the dtype of compute once for forward, and those of layers for the backward of
    each microbatch, after which they stay gathered up to the next one's forward. It reduces
    gradients in fp32 for each; stages gather and reduce once, zero2 gathers once. Replicas
    all-reduce shards once. Of the sizes of `work` compute, bytes and activations are proportional
    to the samples of a microbatch, operators and collectives are not.

    Memory: 1F1B has as many microbatches in memory as stages follow, at most all; their saved
    activations are of layers alone, and what the root adds counts once. fully_shard has two
    gathered layers and the root, or all layers with zero2 and in a pipeline, and the largest of
    both once more while its gradient is reduced; stages have unsharded gradients. Offloading moves
    parameters, gradients and optimizer state to the host. Allocators' caches and kernels'
    workspaces are not counted.

    Time: collectives of tensor, context and expert parallelism are exposed; those of data
    parallelism overlap with compute of the same step as `Machine.overlap` says, those of replicas
    without shards do not. Hosts of accelerators launch operators while they compute. The bubble is
    that of equal stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from integration.pipeline.bubble import expected_bubble
from integration.recommend.hardware import Hardware
from integration.recommend.work import InnerWork
from integration.scale.cost import collective_seconds
from integration.scale.strategies import WorldAxis
from integration.scale.traffic import AxisTraffic
from integration.train.config import TrainConfig
from testkit.comm_log import Op

__all__ = ["Memory", "Prediction", "StepSeconds", "predict"]

_FP32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank.

    Activations are largest where backward begins, gradients where it ends.

    Attributes:
        parameters: in fp32, sharded.
        optimizer: state of the optimizer.
        gathered: parameters that fully_shard has gathered, or that autocast has cast, where
            backward begins.
        stays_gathered: further ones where the backward of a microbatch ends.
        gradients: in fp32, sharded.
        reducing: gradients that are being reduced.
        activations: saved for backward, and temporary.
        accumulated: gradients where backward begins: of earlier microbatches, or in buffers that
            replicas keep for them.
        host: bytes on the rank's host.
    """

    parameters: float
    optimizer: float
    gathered: float
    stays_gathered: float
    gradients: float
    reducing: float
    activations: float
    accumulated: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the rank's device at the peak of a step."""
        begins = self.activations + self.accumulated
        ends = self.stays_gathered + self.gradients + self.reducing
        return self.parameters + self.optimizer + self.gathered + max(begins, ends)


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step; what overlaps is counted where it is exposed.

    Attributes:
        compute: matrix products, attention, and memory of other operators.
        host: launching operators, as far as ranks wait for it.
        tensor: collectives of tensor parallelism.
        context: collectives of context parallelism.
        experts: exchanges of tokens.
        data: gathers and reductions of data parallelism, as far as they are exposed.
        transfers: sending hidden states and their gradients between stages.
        bubble: waiting for other stages.
        update: the optimizer, with transfers of offloading.
    """

    compute: float
    host: float
    tensor: float
    context: float
    experts: float
    data: float
    transfers: float
    bubble: float
    update: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def busy(self) -> float:
        """Seconds in which the rank does not wait for other stages."""
        return self.total - self.bubble

    @property
    def reason(self) -> str:
        """The largest terms with their shares, those above a tenth, as a clause."""
        shares = {field.name: getattr(self, field.name) / self.total for field in fields(self)}
        largest = sorted(shares.items(), key=lambda each: -each[1])
        named = [f"{_NAMES[name]} {share:.0%}" for name, share in largest if share >= 0.1]
        return ", ".join(named)


_NAMES = {
    "compute": "compute", "host": "launching operators", "tensor": "TP", "context": "CP",
    "experts": "EP", "data": "gathers and reductions", "transfers": "PP",
    "bubble": "bubble", "update": "optimizer",
}  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """What a candidate takes.

    Attributes:
        config: its options.
        memory: of the rank that has most.
        time: of a step.
        sent: bytes that a rank sends in a step.
    """

    config: TrainConfig
    memory: Memory
    time: StepSeconds
    sent: float


def predict(
    config: TrainConfig, inner: InnerWork, ranks: int, hardware: Hardware, state_bytes: float
) -> Prediction:
    """Predicts a candidate.

    Args:
        config: its options.
        inner: the work of its inner product.
        ranks: number of ranks.
        hardware: of the ranks.
        state_bytes: bytes of optimizer state of an element.
    """
    step = _Step(config, inner, ranks, hardware)
    return Prediction(config, step.memory(state_bytes), step.seconds(state_bytes), step.sent)


@dataclass(frozen=True)
class _Parameters:
    """Parameters of a rank before fully_shard, that are sharded and replicated alike.

    Attributes:
        elements: their number.
        root: how many of them are the root's, which is gathered in forward only.
        shard: ranks that fully_shard shards them over.
        replicate: ranks that have the same shards.
    """

    elements: float
    root: float
    shard: WorldAxis
    replicate: WorldAxis

    @property
    def owned(self) -> float:
        """Elements of a shard."""
        return self.elements / self.shard.size


class _Step:
    """A step of a candidate on one rank.

    Attributes:
        sent: bytes that were sent by what has been predicted so far.
    """

    def __init__(
        self, config: TrainConfig, inner: InnerWork, ranks: int, hardware: Hardware
    ) -> None:
        self._config, self._inner, self._hardware = config, inner, hardware
        pp, data = config.pp_degree, config.dp_replicate * config.dp_shard
        samples = config.global_batch // data
        parts = (config.pp_microbatches or 1) if pp > 1 else 1
        self._microbatches = parts * (samples // config.micro_batch)
        self._size = samples // self._microbatches  # samples of a microbatch
        # Stages have about equal numbers of layers, where the root's ends count as one each.
        units = inner.layers + 2
        self._share = math.ceil(units / pp) / units if pp > 1 else 1.0
        self._layers = min(inner.layers, math.ceil(units / pp)) if pp > 1 else inner.layers
        self._itemsize = _FP32 if config.dtype == "fp32" else 2
        self._is_sharded = config.dp_shard > 1
        self._root = inner.root.elements / min(2, pp)
        self._parameters = [self._of_all(data)]
        if inner.layer.experts:
            self._parameters.append(self._of_experts(data))
        self._stages = WorldAxis("pp", min(2, pp), ranks // pp)
        self.sent = 0.0

    def _of_all(self, data: int) -> _Parameters:
        config = self._config
        shards = config.dp_shard * config.cp if self._is_sharded else 1
        copies = data * config.cp // shards
        elements = self._root + self._layers * self._inner.layer.elements
        return _Parameters(
            elements, self._root, WorldAxis("shard", shards, config.tp),
            WorldAxis("replicate", copies, config.tp * shards),
        )  # fmt: skip

    def _of_experts(self, data: int) -> _Parameters:
        config = self._config
        stride = config.tp if config.cp > 1 else config.tp * config.ep
        shards = config.dp_shard * config.cp // config.ep if self._is_sharded else 1
        copies = config.dp_replicate if self._is_sharded else data * config.cp // config.ep
        return _Parameters(
            self._layers * self._inner.layer.experts, 0.0, WorldAxis("shard", shards, stride),
            WorldAxis("replicate", copies, stride * shards),
        )  # fmt: skip

    @property
    def _owned(self) -> float:
        """Elements of parameters that the rank updates."""
        return sum(each.owned for each in self._parameters)

    @property
    def _backwards(self) -> int:
        """How often layers are gathered for backward in a step."""
        return 0 if self._keeps_gathered else self._microbatches

    @property
    def _keeps_gathered(self) -> bool:
        return self._config.pp_degree > 1 or self._config.placements == "zero2"

    def memory(self, state_bytes: float) -> Memory:
        """Returns the memory of the rank."""
        inner, size = self._inner, self._itemsize
        layer = inner.largest
        everything = sum(each.elements for each in self._parameters)
        in_pipeline, owned = self._config.pp_degree > 1, _FP32 * self._owned
        gathered = stays = reducing = 0.0
        accumulated = owned if self._microbatches > 1 else 0.0
        if self._is_sharded:
            working = min(everything, self._root + 2 * layer)
            gathered = size * (everything if self._keeps_gathered else working)
            if self._config.placements == "zero2" and size == _FP32:
                gathered -= owned  # shards are views of what stays gathered
            elif self._microbatches > 1:
                stays = size * everything - gathered
            reducing = (size + _FP32) * max(self._root, layer)
            if in_pipeline:  # unsharded, up to the last microbatch
                accumulated = _FP32 * everything
                reducing += accumulated
        else:
            gathered = size * everything if size != _FP32 else 0.0  # casts of autocast
            if any(each.replicate.size > 1 for each in self._parameters):
                accumulated = owned
        in_flight = min(self._config.pp_degree, self._microbatches)
        saved = in_flight * self._layers * inner.layer.saved
        activations = self._size * (saved + inner.root.saved + inner.temporary)
        state, host = state_bytes * self._owned, 0.0
        if self._config.offload:
            host, owned, state = 2 * owned + state, 0.0, 0.0
            accumulated = accumulated if in_pipeline else 0.0
        return Memory(
            owned, state, gathered, stays, owned, reducing, activations, accumulated, host
        )

    def seconds(self, state_bytes: float) -> StepSeconds:
        """Returns the seconds of a step; adds the bytes that are sent."""
        hardware, machine = self._hardware, self._hardware.machine
        work = self._inner.root.work.plus(self._inner.layer.work, self._inner.layers)
        flops = work.flops / (machine.peak * machine.efficiency)
        compute = self._share * self._size * (flops + work.nbytes / hardware.memory_bandwidth)
        host = self._share * work.operators * hardware.operator
        spent = {"tensor": 0.0, "context": 0.0, "experts": 0.0}
        for one in work.traffic:
            spent[_KINDS.get(one.axis.name, "tensor")] += self._collectives(one)
        device = compute + sum(spent.values())
        if hardware.accelerator:
            host = max(0.0, host - device)
        times, transfers, bubble = self._microbatches, 0.0, 0.0
        busy = times * (device + host)
        if self._config.pp_degree > 1:
            idle = expected_bubble("1F1B", self._config.pp_degree, times, 1) or 0.0
            transfers, bubble = self._transfers(), busy * idle / (1 - idle)
        return StepSeconds(
            times * compute, times * host,
            **{name: times * seconds for name, seconds in spent.items()},
            data=self._data_seconds(times * compute), transfers=transfers, bubble=bubble,
            update=self._update(state_bytes),
        )  # fmt: skip

    def _collectives(self, one: AxisTraffic) -> float:
        """Returns the seconds of the collectives of an inner axis in a microbatch."""
        nbytes = round(self._share * self._size * one.nbytes)
        self.sent += self._microbatches * nbytes
        if one.op == "recv" and self._hardware.accelerator:
            return 0.0  # in the time of the neighbour's send
        is_transfer = one.op in ("send", "recv")  # with a neighbour
        axis = WorldAxis(one.axis.name, 2, one.axis.stride) if is_transfer else one.axis
        calls = max(1, round(self._share * one.calls))
        return collective_seconds(AxisTraffic(one.op, axis, calls, nbytes), self._hardware.machine)

    def _data_seconds(self, compute: float) -> float:
        """Returns the exposed seconds of gathers and reductions."""
        layers, overlapping, exposed = self._layers, 0.0, 0.0
        for each in self._parameters:
            if (size := each.shard.size) > 1:
                gathered = each.elements + self._backwards * (each.elements - each.root)
                reductions = 1 if self._config.pp_degree > 1 else self._microbatches
                others, gathers = (size - 1) / size, layers + 1 + self._backwards * layers
                overlapping += self._send(
                    "all_gather", each.shard, gathers, self._itemsize * gathered * others
                )
                overlapping += self._send(
                    "reduce_scatter",
                    each.shard,
                    reductions * (layers + 1),
                    reductions * _FP32 * each.elements * others,
                )
                exposed += self._hardware.bucket * (gathers + reductions * (layers + 1))
            if (copies := each.replicate.size) > 1:
                sent = 2 * _FP32 * each.owned * (copies - 1) / copies
                seconds = self._send("all_reduce", each.replicate, layers + 1, sent)
                if self._is_sharded:
                    overlapping += seconds
                else:
                    exposed += seconds
        return exposed + max(0.0, overlapping - self._hardware.machine.overlap * compute)

    def _transfers(self) -> float:
        """Returns the seconds of sending hidden states to the next stage, and gradients back."""
        neighbours = min(2, self._config.pp_degree - 1)  # the first stage sends no gradients
        calls = neighbours * self._microbatches
        spent = self._send("send", self._stages, calls, calls * self._size * self._inner.boundary)
        if not self._hardware.accelerator:  # as many are received, by the host
            spent += calls * self._hardware.machine.inside.latency
        return spent

    def _send(self, op: Op, axis: WorldAxis, calls: int, nbytes: float) -> float:
        self.sent += nbytes
        return collective_seconds(
            AxisTraffic(op, axis, calls, round(nbytes)), self._hardware.machine
        )

    def _update(self, state_bytes: float) -> float:
        """Returns the seconds of the optimizer, which reads and writes what it updates."""
        owned, hardware = self._owned, self._hardware
        touched = owned * (3 * _FP32 + 2 * state_bytes)
        if not self._config.offload:
            return touched / hardware.memory_bandwidth
        moves = 1 + self._backwards + 1
        return (touched + _FP32 * owned * moves) / hardware.host_bandwidth


_KINDS = {"cp": "context", "ep": "experts"}
