"""The self-check passes on this machine for every draw, and can fail."""

import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from dist_rng import _compat, _core, cpu
from dist_rng.cpu import draws, self_check
from dist_rng.distributions import BernoulliTensor, Normal, Uniform
from dist_rng.regions.region import Region

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EVERYTHING = [
    (kind, dtype, chance)
    for kind, dtypes in draws._SUPPORTED.items()
    for dtype in dtypes
    for chance in (FLOATS if kind is BernoulliTensor else (None,))
]


@pytest.fixture
def unchecked():
    """Clears the caches of draws and of checks, before and after the test."""
    for cached in (self_check.check, draws.cpu_draw):
        cached.cache_clear()
    yield
    for cached in (self_check.check, draws.cpu_draw):
        cached.cache_clear()


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512"])
def test_every_draw_of_every_dtype_equals_torch(instruction_set, unchecked):
    best = _core.instruction_set()
    if not _core.use_instruction_set(instruction_set):
        pytest.skip(f"this processor has no {instruction_set}")
    try:
        for case in EVERYTHING:
            self_check.check(*case)
    finally:
        assert _core.use_instruction_set(best)


# With 20,011 elements one rounding more or less changes a value in every dtype.
IN_ANOTHER_PROCESS = """
import sys
import torch
from dist_rng.cpu import self_check
self_check._SIZES = (20011, 107, 11)
assert torch.backends.cpu.get_cpu_capability() == sys.argv[1], "capability not taken"
for kind in self_check._SAMPLES:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        chance = torch.float32 if kind.__name__ == "BernoulliTensor" else None
        self_check.check(kind, dtype, chance)
        if kind.__name__ == "Normal":  # many elements of the serial path
            from dist_rng.cpu.draws import CompiledLayout, cpu_draw
            from dist_rng import _core
            actual = torch.empty(150, 137, dtype=dtype)
            expected = torch.empty(137, 150, dtype=dtype)
            generator = torch.Generator().manual_seed(1)
            state = generator.get_state()
            grid = _core.LocalGrid([[(0, 20550)]], [1], [1])
            layout = CompiledLayout(grid, 20550, contiguous=False)
            draw = self_check._SAMPLES[kind][0]
            cpu_draw(draw, dtype, None)(layout, state.data_ptr(), actual.data_ptr(), 0)
            expected.t().normal_(draw.mean, draw.std, generator=generator)
            assert torch.equal(actual.flatten(), expected.flatten()), dtype
            assert torch.equal(state, generator.get_state()), dtype
"""


# Every other test runs with the processor's best.
@pytest.mark.parametrize(
    "capability",
    ["default", *(pytest.param(one, marks=pytest.mark.slow) for one in ("avx2", "avx512"))],
)
def test_every_cpu_capability_of_torch_is_reproduced(capability):
    if capability.upper() not in _capabilities():
        pytest.skip(f"this processor has no {capability}")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, capability.upper()]
    subprocess.run(command, env=environment, check=True)


def _capabilities():
    order = ["DEFAULT", "AVX2", "AVX512"]
    return order[: order.index(torch.backends.cpu.get_cpu_capability()) + 1]


@pytest.mark.parametrize("draw", [Uniform(), Normal()])
def test_a_torch_that_rounds_differently_raises_before_anything_is_drawn(
    draw, unchecked, monkeypatch
):
    other = not draws.torch_uses_fma()
    monkeypatch.setattr(draws, "torch_uses_fma", lambda: other)
    generator, local = torch.Generator().manual_seed(0), torch.zeros(40)
    state = generator.get_state()
    with pytest.raises(RuntimeError, match="on this machine differently"):
        cpu.fill(local, Region.full((40,)), draw, generator)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(local, torch.zeros(40))


def test_the_check_runs_once_and_does_not_advance_generators(unchecked):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        cpu.fill(torch.empty(4), Region.full((4,)), Uniform(), generator)
    assert self_check.check.cache_info().misses == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_the_check_disables_the_modes_of_its_caller(unchecked):
    local = torch.empty(4)
    with torch.device("meta"):
        cpu.fill(local, Region.full((4,)), Uniform(), torch.Generator("cpu"))


def test_the_installed_torch_is_in_the_table_of_releases():
    assert _compat.torch_release() in _compat.CPU_RELEASES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_canary_uniform_16_bit_floats_have_the_bits_of_the_table(dtype):
    drawn = torch.empty(4096, dtype=dtype).uniform_(generator=torch.Generator().manual_seed(0))
    coarse = 2.0 ** (8 if dtype == torch.bfloat16 else 11)
    multiples_only = bool((drawn.double() * coarse == (drawn.double() * coarse).round()).all())
    assert multiples_only == (_compat.cpu_release() == _core.TorchRelease.torch_2_11)


def test_an_unknown_release_raises(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(RuntimeError, match=r"got 2\.99\.0"):
        _compat.cpu_release()


def test_every_supported_case_is_listed():
    dtypes = {dtype for _, dtype, _ in EVERYTHING}
    assert dtypes == set(draws.CORE_DTYPES)
    assert len(EVERYTHING) == len({*EVERYTHING}) > len(list(product(FLOATS, FLOATS)))
