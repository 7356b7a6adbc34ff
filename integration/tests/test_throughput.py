"""FLOPs of a step by the formula that everybody knows, and the share of the peak."""

import pytest
import torch
from torch import nn

from integration.device import CPU
from integration.models import model_shape
from integration.train.measurement.throughput import Throughput, count_flops, peak_flops

TOKENS = {name: torch.empty(2, 64, dtype=torch.int64) for name in ("input_ids", "labels")}


def by_formula(model, share=lambda name: 1.0):
    """6 N + 12 L h s for each token (PaLM, appendix B), N without the embedding's look-up."""
    matrices = [(n, p) for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n]
    active = sum(p.numel() * share(name) for name, p in matrices)
    config = model.config
    attention = 12 * config.num_hidden_layers * config.hidden_size * 64
    return 2 * 64 * (6 * active + attention)


def test_a_decoder_needs_what_the_formula_says():
    shape = model_shape("llama-10m")
    before = torch.get_rng_state()

    def build():
        return shape.build(dropout=0.0)

    assert count_flops(build, TOKENS) == by_formula(build())
    torch.set_rng_state(before)
    count_flops(build, TOKENS)
    assert torch.equal(torch.get_rng_state(), before)


def test_of_a_mixture_only_the_active_experts_count():
    shape = model_shape("mixtral-tiny")  # of 4 experts 2

    def build():
        return shape.build(dropout=0.0)

    expected = by_formula(build(), lambda name: 2 / 4 if ".experts." in name else 1.0)
    assert count_flops(build, TOKENS) == expected


def test_convolutions_count():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(1, 16, 2, stride=2)

        def forward(self, images):
            self.loss = self.patches(images).square().mean()
            return self

    # Forward, and the gradient of the weight; images have none.
    expected = 2 * (2 * 5 * 16 * 16 * 4)
    assert count_flops(Patches, {"images": torch.empty(5, 1, 8, 8)}) == expected


def test_the_share_of_the_peak():
    assert Throughput(flops=30, peak=100.0).mfu(0.5) == pytest.approx(0.6)
    assert 1e8 < peak_flops(CPU) < 1e14
