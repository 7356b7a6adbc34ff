"""Times steps of fsdp.optim.Muon and of a naive one on 2 and 4 gloo ranks.

    python packages/fsdp/benchmarks/muon.py [--ranks=2,4] [--rounds=5] [--json=FILE]

The naive step gathers every matrix on every rank, and each rank iterates on all of them, as
`full_tensor()` in an optimizer does. Variants take turns, step by step, in the same processes. A
ratio is the median over rounds of the ratio to the naive step of the same round. Bytes are the sum
of what all ranks send in a step.
"""

import torch
from matrix_steps import NAIVE, main, own_run, sharded, whole

from fsdp.optim import Muon
from fsdp.optim.matrix import exchange
from fsdp.optim.muon.newton_schulz import COEFFICIENTS, adjusted_lr, newton_schulz


class Naive:
    """Torch's Muon on gathered matrices."""

    def __init__(self, params, dtype):
        self.params, self.dtype = list(params), dtype
        self.momenta = [torch.zeros_like(param) for param in self.params]

    @torch.no_grad()
    def step(self):
        for param, momentum in zip(self.params, self.momenta, strict=True):
            momentum.lerp_(param.grad, 0.05)
            update = param.grad.lerp(momentum, 0.95).to(self.dtype).full_tensor()
            result = newton_schulz(update, COEFFICIENTS, 5, 1e-7).contiguous()
            local = param.to_local()
            local.mul_(1 - 0.02 * 0.1)
            lr = adjusted_lr(0.02, None, tuple(param.shape))
            local.view(-1).add_(own_run(param, result), alpha=-lr)


def muon(model, kind=Muon, **options):
    return kind(model.named_parameters(), lr=0.02, **options)


class Blocking(Muon):
    """Waits for each exchange where it is started."""

    def step(self, closure=None):
        original = exchange.redistribute_many
        exchange.redistribute_many = lambda *args, **_: Completed(original(*args))
        try:
            return super().step(closure)
        finally:
            exchange.redistribute_many = original


class Completed(list):
    def wait(self):
        return self


VARIANTS = {
    NAIVE: lambda: Naive(sharded().parameters(), torch.float32),
    "naive, gathered in bfloat16": lambda: Naive(sharded().parameters(), torch.bfloat16),
    "Muon": lambda: muon(sharded()),
    "Muon, buckets of 1 MB": lambda: muon(sharded(), bucket_mb=1),
    "the same, nothing overlapped": lambda: muon(sharded(), Blocking, bucket_mb=1),
    "Muon, Whole()": lambda: muon(whole()),
}


if __name__ == "__main__":
    main(VARIANTS, __doc__, rounds=5)
