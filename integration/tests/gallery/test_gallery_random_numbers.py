"""The picture of random numbers: what its panels say of the masks."""

import pytest
import torch

from integration.gallery.pictures.random_numbers import one_device, sharded


def test_ranks_with_dist_rng_have_the_mask_of_one_device():
    assert torch.equal(sharded(use_dist_rng=True), one_device())


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
def test_ranks_of_a_cpu_mesh_repeat_each_other_without_it():
    first, *others = sharded(use_dist_rng=False).chunk(4)
    assert all(torch.equal(first, each) for each in others)
    assert not torch.equal(torch.cat([first, *others]), one_device())
