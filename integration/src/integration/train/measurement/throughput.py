"""Computes MFU from the FLOPs of a step and the peak FLOP/s."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from integration.data import POSITIONS
from integration.device import Device
from integration.models import ModelShape, loss_of
from integration.train.setup import Setup

# Dense bfloat16 FLOP/s by a part of the GPU's name, first match; from vendors' data sheets.
_PEAK_FLOPS = {
    "B200": 2.25e15,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "MI300X": 1307e12,
}


@dataclass(frozen=True)
class Throughput:
    """The constants of MFU.

    Attributes:
        flops: model FLOPs of a global batch; see `count_flops`.
        peak: peak FLOP/s of all ranks; infinite if unknown.
    """

    flops: int
    peak: float

    @staticmethod
    def of(setup: Setup, sample: Mapping[str, Tensor]) -> "Throughput":
        """Returns the throughput constants of a run; all ranks call it and measure their peaks."""
        config = setup.config
        inputs = tuple(
            (name, tensor.shape, tensor.dtype)
            for name, tensor in sample.items()
            if name != POSITIONS
        )
        flops = _flops_of_sample(setup.shape, config.dropout, inputs)
        # Of which each rank has its own, and an unknown one is infinite.
        own = config.peak_flops or peak_flops(setup.system.device) or math.inf
        peak = torch.tensor(own, dtype=torch.float64, device=setup.system.device.current)
        dist.all_reduce(peak)
        return Throughput(flops * config.global_batch, float(peak))

    def mfu(self, seconds: float) -> float | None:
        """Returns the MFU of a step of so many seconds; None if a device's peak is unknown."""
        return None if math.isinf(self.peak) else self.flops / seconds / self.peak


@cache  # runs of a session often have one model
def _flops_of_sample(
    shape: ModelShape, dropout: float, inputs: tuple[tuple[str, torch.Size, torch.dtype], ...]
) -> int:
    batch = {name: torch.empty(1, *size, dtype=dtype) for name, size, dtype in inputs}
    return count_flops(partial(shape.build, dropout=dropout), batch)


def count_flops(build: Callable[[], nn.Module], batch: Mapping[str, Tensor]) -> int:
    """Returns the FLOPs of forward and backward of a batch, a multiply-add being two.

    Matrix products, convolutions and attention count; recomputation does not, as MFU counts the
    FLOPs that the model needs (PaLM, arXiv 2204.02311, appendix B). Causal attention counts in
    full, and so does that within documents. Of a mixture of experts, the experts that a token is
    routed to count.

    Args:
        build: builds the model; its tensors are fake, so that nothing is allocated or drawn.
        batch: arguments of ``forward``, of which shapes and dtypes matter.
    """
    # torch's formulas for fused attention include recomputation in backward.
    with FakeTensorMode(), torch.random.fork_rng(devices=()), sdpa_kernel(SDPBackend.MATH):
        model = build()
        config = getattr(model, "config", None)
        if getattr(config, "num_experts_per_tok", None):
            # Other implementations find the selected experts, and so need data.
            config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
        fake = {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in batch.items()
        }
        with FlopCounterMode(display=False) as counter:
            loss_of(model(**fake)).backward()
    flops: int = counter.get_total_flops()
    return flops


def peak_flops(device: Device) -> float | None:
    """Returns a device's peak FLOP/s: a GPU's by its name, if known, the host's as measured."""
    if not device.is_accelerator or device.is_simulated:
        return _measured()
    name = device.name
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def _measured(size: int = 512, rounds: int = 8) -> float:
    """Returns the FLOP/s of an fp32 matrix product, the best of several short rounds."""
    left, right = torch.ones(size, size), torch.ones(size, size)
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
