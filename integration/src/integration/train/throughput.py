"""How much of the machine a run uses: FLOPs of a step, FLOP/s at best, and the share (MFU)."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from integration.models import loss_of
from integration.train.setup import Setup

# Dense bfloat16 FLOP/s of a GPU by what its name holds, the first that fits; vendors' data sheets.
_KNOWN = {
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
    """What a step needs and what the machine could do.

    Attributes:
        flops: of the model for a global batch; see `count_flops`.
        peak: FLOP/s of all ranks at best.
    """

    flops: int
    peak: float

    @staticmethod
    def of(setup: Setup, sample: Mapping[str, Tensor]) -> "Throughput":
        """Returns the throughput constants of a run; all ranks call it and measure their peaks."""
        config = setup.config
        build = partial(setup.shape.build, dropout=config.dropout)
        flops = count_flops(build, {name: tensor[None] for name, tensor in sample.items()})
        peak = torch.tensor(config.peak_flops or peak_flops(), dtype=torch.float64)
        dist.all_reduce(peak)
        return Throughput(flops * config.global_batch, float(peak))

    def mfu(self, seconds: float) -> float:
        """Returns the share of the peak that a step of so many seconds reached."""
        return self.flops / seconds / self.peak


def count_flops(build: Callable[[], nn.Module], batch: Mapping[str, Tensor]) -> int:
    """Returns the FLOPs of forward and backward of a batch, a multiply-add being two.

    Those of matrix products, convolutions and attention; what activation checkpointing repeats is
    not in it, as MFU counts what the model needs (PaLM, arXiv 2204.02311, appendix B). Attention
    counts in full, causal or not. Of a mixture, only the experts that a token is sent to count.

    Args:
        build: makes the model; its tensors are fake, so nothing is allocated or drawn.
        batch: arguments of ``forward``; only shapes and dtypes matter.
    """
    # Fused attention's own formulas count what its backward computes again.
    with FakeTensorMode(), torch.random.fork_rng(devices=()), sdpa_kernel(SDPBackend.MATH):
        model = build()
        config = getattr(model, "config", None)
        if getattr(config, "num_experts_per_tok", None):
            # Others look up which experts are hit, and so need numbers.
            config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
        fake = {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in batch.items()
        }
        with FlopCounterMode(display=False) as counter:
            loss_of(model(**fake)).backward()
    flops: int = counter.get_total_flops()
    return flops


def peak_flops() -> float:
    """Returns the FLOP/s of this process at best: those of its GPU, or measured on its threads.

    Raises:
        ValueError: the GPU is not known.
    """
    if not torch.cuda.is_initialized():
        return _measured()
    name = torch.cuda.get_device_name()
    for part, flops in _KNOWN.items():
        if part in name:
            return flops
    raise ValueError(f"the peak FLOP/s of {name!r} are not known; give --peak-flops")


def _measured(size: int = 512, rounds: int = 8) -> float:
    """That of an fp32 matrix product, the best of some rounds of a few milliseconds each."""
    left, right = torch.ones(size, size), torch.ones(size, size)
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
