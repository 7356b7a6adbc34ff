"""The emulated device's generators: seeding, saved states, CPU draws, nesting."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dist_rng import emulation
from dist_rng.distributions import Bernoulli, Uniform
from dist_rng.emulation.device import active_geometry, emulated_device, is_active
from dist_rng.philox.geometry import Geometry
from dist_rng.regions.region import Region

SMALL = Geometry(2, 512)


def draw_three():
    local = torch.empty(3)
    emulation.fill(local, Region.full((3,)), Uniform())
    return local


def test_seeding_again_with_the_same_seed_starts_over():
    with emulated_device(SMALL):
        torch.manual_seed(1)
        first, second = draw_three(), draw_three()
        assert not first.equal(second)
        torch.manual_seed(1)
        assert draw_three().equal(first)
        torch.manual_seed(2)
        assert not draw_three().equal(first)


@pytest.mark.parametrize("draws", [1, 600, 5000])
def test_cpu_draws_and_the_emulated_device_are_independent(draws):
    torch.manual_seed(1)
    expected_cpu = [torch.rand(draws) for _ in range(3)]
    with emulated_device(SMALL):
        torch.manual_seed(1)
        expected = [draw_three() for _ in range(3)]
        for _ in range(2):  # the second time the offset of the first is in the state
            torch.manual_seed(1)
            for on_cpu, on_gpu in zip(expected_cpu, expected, strict=True):
                assert torch.rand(draws).equal(on_cpu)
                assert draw_three().equal(on_gpu)


@pytest.mark.parametrize("draws", [0, 1, 5000])
def test_a_saved_state_carries_the_offset(draws):
    with emulated_device(SMALL):
        torch.manual_seed(1)
        draw_three()
        torch.rand(draws)
        state = torch.get_rng_state()
        first = draw_three()
        torch.rand(draws)
        torch.set_rng_state(state)
        assert draw_three().equal(first)
        with torch.random.fork_rng():
            inside = draw_three()
        assert draw_three().equal(inside)


def test_checkpointing_draws_the_same_mask_twice():
    seen = []

    def layer(x):
        mask = torch.empty(x.shape)
        emulation.fill(mask, Region.full(x.shape), Bernoulli(0.5))
        seen.append(mask)
        return x * mask

    x = torch.ones(50, requires_grad=True)
    with emulated_device(SMALL):
        for reentrant in (False, True):
            checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
            draw_three()
    assert seen[0].equal(seen[1])
    assert seen[2].equal(seen[3])
    assert not seen[0].equal(seen[2])


def test_each_generator_represents_a_cuda_generator():
    with emulated_device(SMALL):
        torch.manual_seed(1)
        expected = [draw_three() for _ in range(2)]
        torch.manual_seed(9)
        generator = torch.Generator().manual_seed(1)
        for wanted in expected:
            local = torch.empty(3)
            emulation.fill(local, Region.full((3,)), Uniform(), generator)
            assert local.equal(wanted)
            draw_three()


def test_a_generator_that_has_drawn_on_the_cpu_raises():
    generator = torch.Generator().manual_seed(1)
    with emulated_device(SMALL):
        emulation.fill(torch.empty(3), Region.full((3,)), Uniform(), generator)
        torch.rand(5000, generator=generator)
        with pytest.raises(RuntimeError, match="use separate generators"):
            emulation.fill(torch.empty(3), Region.full((3,)), Uniform(), generator)


def test_nested_emulated_devices_are_separate():
    with emulated_device(SMALL):
        torch.manual_seed(1)
        first = draw_three()
        with emulated_device(Geometry.H100):
            assert active_geometry() == Geometry.H100
            assert draw_three().equal(first)
        assert active_geometry() == SMALL
        second = draw_three()
        torch.manual_seed(1)
        draw_three()
        assert draw_three().equal(second)
    assert not is_active()


def test_the_context_leaves_torch_as_it_was():
    functions = (torch.get_rng_state, torch.random.get_rng_state, torch.cuda.manual_seed_all)
    torch.manual_seed(3)
    torch.rand(5)
    state = torch.get_rng_state()
    with emulated_device(SMALL):
        draw_three()
    assert torch.get_rng_state().equal(state)
    assert functions == (
        torch.get_rng_state,
        torch.random.get_rng_state,
        torch.cuda.manual_seed_all,
    )
