"""What tests of several files begin with."""

import pytest
import torch
from torch import nn

import dtensor_rules
from plan_api import options
from testkit import fake_mesh, preload

preload(
    "plan_api",
    "dist_rng",
    "dtensor_rules.switch",
    "fused_comm.grad_reducer",
    "transformers.models.llama.modeling_llama",
    "testkit.sim.ranks",
    "pytest",  # which ranks import with each module of tests
)


class Block(nn.Module):
    """Two Linears; the second argument may be given by name."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x, mask=None, *, bias=None):
        y = self.down(torch.relu(self.up(x))) * self.scale
        return y if mask is None else (y, mask)


class Model(nn.Module):
    """Blocks, with the last one's weights tied to the first's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[2].up.weight = self.layers[0].up.weight

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def without_dtensor_rules():
    """Another test of this process may have left it on."""
    enabled = dtensor_rules.is_enabled()
    dtensor_rules.disable()
    yield
    if enabled:
        dtensor_rules.enable()


@pytest.fixture
def mesh(monkeypatch, without_dtensor_rules):
    """A fake mesh of data and tensor parallel axes; of other packages fused-comm is found."""
    monkeypatch.setattr(options, "find_spec", lambda name: name == "fused_comm" or None)
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        yield mesh
