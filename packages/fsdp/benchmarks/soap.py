"""Times steps of fsdp.optim.SOAP and of a naive one on 2 and 4 gloo ranks.

    python packages/fsdp/benchmarks/soap.py [--ranks=2,4] [--rounds=10] [--json=FILE]

The naive step gathers every gradient on every rank, and each rank has the state of all blocks and
computes on them all. Ten rounds have one update of the bases. Variants take turns, step by step, in
the same processes. A ratio is the median over rounds of the ratio to the naive step of the same
round. Bytes are the sum of what all ranks send in a step.
"""

import torch
from matrix_steps import NAIVE, main, own_run, sharded, whole

from fsdp.optim import SOAP
from testkit.models.reference_soap import ReferenceSoap

SIZE = 256


class Naive:
    """The plain optimizer, on what is gathered."""

    def __init__(self, params):
        self.params = list(params)
        self.alone = [torch.zeros(param.shape) for param in self.params]
        self.plain = ReferenceSoap(self.alone, lr=1e-3, weight_decay=0.0, block_size=SIZE)

    @torch.no_grad()
    def step(self):
        for param, alone in zip(self.params, self.alone, strict=True):
            alone.zero_()
            alone.grad = param.grad.full_tensor()
        self.plain.step()
        for param, alone in zip(self.params, self.alone, strict=True):
            param.to_local().view(-1).add_(own_run(param, alone))


def soap(model, **options):
    return SOAP(model.named_parameters(), lr=1e-3, weight_decay=0.0, block_size=SIZE, **options)


VARIANTS = {
    NAIVE: lambda: Naive(sharded().parameters()),
    "SOAP": lambda: soap(sharded()),
    "SOAP, buckets of 1 MB": lambda: soap(sharded(), bucket_mb=1),
    "SOAP, Whole()": lambda: soap(whole()),
}

if __name__ == "__main__":
    main(VARIANTS, __doc__, rounds=10)
