"""The machines that recommendations are for."""

from __future__ import annotations

from dataclasses import dataclass, field

from integration.scale.cost import Machine, NetworkLink

__all__ = ["HARDWARE", "Hardware"]


@dataclass(frozen=True)
class Hardware:
    """A kind of rank and its links.

    Attributes:
        machine: FLOP/s, memory, ranks of a host, and links.
        accelerator: whether ranks compute on devices of their own, while the host launches
            operators; otherwise the time of launching them is added.
        operator: seconds in which the host launches an operator.
        bucket: seconds of hooks and copies for each collective of fully_shard, where the host does
            not do them while an accelerator computes.
        memory_bandwidth: bytes per second of a rank's memory.
        host_bandwidth: bytes per second between an accelerator and its host, one direction.
        source: where the numbers are from.
    """

    machine: Machine = field(default_factory=Machine)
    accelerator: bool = True
    operator: float = 10e-6
    bucket: float = 0.0
    memory_bandwidth: float = 3.35e12
    host_bandwidth: float = 50e9
    source: str = ""


HARDWARE = {
    "h100": Hardware(
        source=(
            "a host of 8 H100 SXM, not measured: peak, memory and its bandwidth of NVIDIA's data"
            " sheet; half of the peak is reached; latencies of NCCL's src/graph/tuning.cc; 360 GB/s"
            " of NVLink and 40 GB/s of a 400 Gb/s card per rank, and 10 us per operator, assumed"
        ),
    ),
    "gloo": Hardware(
        Machine(
            peak=70e9,
            efficiency=1.0,
            node=64,
            inside=NetworkLink(0.8e9, 220e-6),
            between=NetworkLink(0.8e9, 220e-6),
            overlap=0.0,
            memory=16e9,
        ),
        accelerator=False,
        operator=9.3e-6,
        bucket=0.95e-3,
        memory_bandwidth=14e9,
        host_bandwidth=16e9,
        source=(
            "gloo ranks of one thread on a core of an AMD EPYC, fitted to runs of llama-tiny"
            " (docs/integration/recommend.md) and llama-10m (docs/benchmarks/products.md)"
        ),
    ),
}
