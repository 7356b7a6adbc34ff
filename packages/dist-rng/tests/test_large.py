"""Parts of a tensor of 16 GB, which is not allocated, against torch's stream drawn in chunks."""

import pytest
import torch

import dist_rng
from dist_rng import Region
from testkit import assert_bitwise

NUMEL = 2**32
CHUNK = 2**24
SAMPLE = 5_000
SAMPLED = (0, 1, 100, 128, 255)  # chunks; the last ends the tensor


@pytest.mark.slow
def test_sampled_regions_of_16_gigabytes_and_the_state_after_them():
    generator = torch.Generator().manual_seed(8)
    chunk, expected = torch.empty(CHUNK), {}
    for index in range(NUMEL // CHUNK):
        chunk.uniform_(generator=generator)
        if index in SAMPLED:
            expected[index] = chunk[-SAMPLE:].clone()
    shape = (2**16, 2**16)
    for index, values in expected.items():
        stop = (index + 1) * CHUNK
        sharded = torch.Generator().manual_seed(8)
        local = torch.empty(SAMPLE)
        dist_rng.uniform_(local, Region.flat(shape, stop - SAMPLE, stop), generator=sharded)
        assert_bitwise(local, values, f"the end of chunk {index}")
        assert torch.equal(sharded.get_state(), generator.get_state())
