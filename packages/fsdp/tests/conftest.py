"""Fixtures of all tests of fsdp."""

import os

import pytest
import torch

from testkit import preload

os.environ["HF_HUB_OFFLINE"] = "1"  # of this process and of ranks, where transformers is imported
preload(
    "fsdp.optim",
    "ragged_shard.patches",
    "testkit.models.residual_stack",
    "testkit.sim.ranks",
    "pytest",  # which ranks import with each module of tests
    "transformers.models.llama.modeling_llama",
)


@pytest.fixture(autouse=True)
def one_thread():
    """Uses one thread, as ranks do: two would round some sums differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
