"""Launch geometry: the number of blocks of torch's grid-stride kernels."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dist_rng.philox.geometry import Geometry, LaunchPolicy, policy_of


@pytest.mark.parametrize(
    ("geometry", "most"),
    [
        (Geometry.A100, 108 * 8),
        (Geometry.H100, 132 * 8),
        (Geometry.H200, 132 * 8),
        (Geometry.B200, 148 * 8),
        (Geometry.L4, 58 * 6),
        (Geometry.T4, 40 * 4),
        (Geometry(3, 1000), 3 * 3),  # a part of a block does not run
    ],
    ids=lambda value: str(value),
)
def test_blocks_grow_with_the_tensor_up_to_the_resident_blocks(geometry, most):
    assert geometry.max_blocks == most
    assert [geometry.blocks(numel) for numel in (1, 256, 257)] == [1, 1, 2]
    assert geometry.blocks(256 * most) == geometry.blocks(2**31 - 1) == most
    assert geometry.blocks(256 * (most - 1)) == most - 1
    assert geometry.threads(2**31 - 1) == 256 * most


def test_a_policy_that_counts_the_unroll_needs_fewer_blocks():
    counting = LaunchPolicy(since=(2, 99), counts_unroll=True)
    assert Geometry.H100.blocks(1024, 4, counting) == 1
    assert Geometry.H100.blocks(1025, 4, counting) == 2
    assert Geometry.H100.blocks(1025, 2, counting) == 3
    assert Geometry.H100.blocks(1025) == 5


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1", "2.16.0.dev20261101", "3.0"])
def test_every_supported_release_has_a_policy(version):
    assert not policy_of(version).counts_unroll


def test_older_releases_raise():
    with pytest.raises(ValueError, match=r"got 2\.10\.1"):
        policy_of("2.10.1")


@pytest.mark.parametrize("arguments", [(0, 2048), (-1, 2048), (8, 255)])
def test_impossible_devices_raise(arguments):
    with pytest.raises(ValueError, match="expected at least one SM"):
        Geometry(*arguments)


def test_the_compute_capability_is_not_compared():
    assert Geometry(132, 2048) == Geometry.H200
    assert hash(Geometry(132, 2048)) == hash(Geometry.H200)


def test_of_device_reads_the_device_properties(monkeypatch):
    properties = SimpleNamespace(
        multi_processor_count=58, max_threads_per_multi_processor=1536, major=8
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert Geometry.of_device("cuda:0") == Geometry.L4


def test_integers_of_any_type_become_ints():
    geometry = Geometry(np.int64(108), np.uint16(2048))
    assert geometry == Geometry.A100
    assert {type(n) for n in (geometry.sm_count, geometry.max_threads_per_sm)} == {int}
    with pytest.raises(TypeError, match="integer"):
        Geometry(108.0, 2048)
