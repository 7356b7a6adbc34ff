"""The compiled update has the bits of its reference in torch operators, with all kernels."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp.optim import _core
from fsdp.optim.adam8bit.quantization import CodeBook, block_count, quantize
from fsdp.optim.adam8bit.update import AdamCoefficients, Moments, update, update_many

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module", params=_core.available_kernels())
def kernels(request):
    """Runs all tests with the kernels of every instruction set that this machine supports."""
    before = _core.active_kernels()
    _core.select_kernels(request.param)
    yield request.param
    _core.select_kernels(before)


def coefficients(step=3, *, decoupled=True, weight_decay=0.1):
    return AdamCoefficients.of_step(
        step, 1e-2, (0.9, 0.95), 1e-8, weight_decay, decoupled=decoupled
    )


def moments(first, second, block_size):
    """Returns quantized moments."""
    m = quantize(first, block_size, CodeBook.SIGNED)
    v = quantize(second, block_size, CodeBook.UNSIGNED)
    return Moments(m.codes, m.scales, v.codes, v.scales, block_size)


def tensors(moments):
    return [value for value in vars(moments).values() if isinstance(value, torch.Tensor)]


def copy_of(moments):
    fields = {f.name: getattr(moments, f.name) for f in dataclasses.fields(moments)}
    return Moments(**{k: v.clone() if torch.is_tensor(v) else v for k, v in fields.items()})


def same_bits(actual, expected):
    """Returns whether bits are the same; all NaNs are equal."""
    return torch.equal(actual.nan_to_num(nan=1.5), expected.nan_to_num(nan=1.5)) and torch.equal(
        actual.isnan(), expected.isnan()
    )


def check(params, grads, states, c):
    expected = [
        (param.clone(), copy_of(state)) for param, state in zip(params, states, strict=True)
    ]
    lost = update_many(params, grads, states, c)
    for i, (param, state) in enumerate(expected):
        update(param, grads[i], state, c)
        assert same_bits(params[i], param), i
        for found, other in zip(tensors(states[i]), tensors(state), strict=True):
            assert same_bits(found, other), i
        scales = state.first_scales, state.second_scales
        assert (i in lost) == any(s is not None and bool(s.isnan().any()) for s in scales)


def test_active_kernels_are_those_that_were_selected(kernels):
    assert _core.active_kernels() == kernels
    with pytest.raises(ValueError, match=r"expected one of .*'portable', got 'nope'"):
        _core.select_kernels("nope")
    assert _core.active_kernels() == kernels


def random_case(count, block_size, seed=0):
    torch.manual_seed(seed)
    wide = 10.0 ** (6 * torch.rand(count) - 6)
    return (
        torch.randn(count),
        torch.randn(count) * wide,
        moments(torch.randn(count) * wide, (torch.randn(count) * wide).square(), block_size),
    )


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
@pytest.mark.parametrize("block_size", [1, 3, 32, 256, 2048, 10**6])
def test_bits_for_all_sizes_of_tensors_and_blocks(block_size, decoupled):
    cases = [random_case(count, block_size) for count in (0, 1, 31, 256, 1000, 40_001)]
    check(*map(list, zip(*cases, strict=True)), coefficients(decoupled=decoupled))


@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "coupled"])
def test_bits_with_fp32_moments(decoupled):
    param, grad, _ = random_case(1003, 64)
    state = Moments(torch.randn(1003), None, torch.rand(1003), None, 64)
    check([param], [grad], [state], coefficients(decoupled=decoupled))


def test_bits_with_several_threads():
    before = torch.get_num_threads()
    cases = [random_case(count, 256) for count in (300_000, 17, 500_003)]
    cases[0][1][5] = torch.nan
    torch.set_num_threads(3)
    try:
        check(*map(list, zip(*cases, strict=True)), coefficients())
    finally:
        torch.set_num_threads(before)


def with_neighbours(boundaries):
    """Returns each boundary, its neighbours, and their negatives."""
    up, down = torch.tensor(torch.inf), torch.tensor(0.0)
    near = [boundaries, torch.nextafter(boundaries, up), torch.nextafter(boundaries, down)]
    return torch.cat([torch.cat(near), -torch.cat(near)])


@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-125, 2.0**-128, 2.0**-131, 2.0**100], ids=str)
def test_codes_at_every_boundary(scale):
    """Tests new moments at, just above and just below each boundary between codes."""
    values = torch.cat([with_neighbours(CodeBook.SIGNED.boundaries(CPU)), torch.ones(1)]) * scale
    squares = torch.cat([CodeBook.UNSIGNED.boundaries(CPU), torch.ones(1)]) * scale
    near = torch.cat([squares, torch.nextafter(squares, torch.zeros(1))])
    count = max(len(values), len(near))
    first, second = torch.zeros(count), torch.zeros(count)
    first[: len(values)], second[: len(near)] = values, near
    # With these coefficients the gradient is the new first moment, and its square the second.
    c = AdamCoefficients(0.0, 1.0, 0.0, 1.0, 0.1, 1.0, 1e-8, 1.0, 0.0)
    for grad in (first, second.sqrt()):
        state = moments(torch.zeros(count), torch.zeros(count), count)
        check([torch.zeros(count)], [grad.clone()], [state], c)


def test_codes_of_many_numbers():
    """Tests every 128th magnitude from 2**-24 to 1 with both signs."""
    low, high = torch.tensor([2.0**-24, 1.0]).view(torch.int32).tolist()
    values = torch.arange(low, high + 1, 128, dtype=torch.int32).view(torch.float32)
    values = torch.cat([values, -values, torch.ones(1)])
    count = len(values)
    # The gradient is the new first moment.
    c = AdamCoefficients(0.0, 1.0, 0.0, 1.0, 0.1, 1.0, 1e-8, 1.0, 0.0)
    state = moments(torch.zeros(count), torch.zeros(count), count)
    check([torch.zeros(count)], [values], [state], c)


special = st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 1e-30, 1e30, 3e38, torch.inf, -torch.inf, torch.nan, 1.0]
)


@settings(deadline=None)  # sanitizers are slow
@given(
    grads=st.lists(special | st.floats(-4, 4, width=32), min_size=1, max_size=20),
    params=st.lists(st.floats(width=32), min_size=20, max_size=20),
    block_size=st.integers(1, 8),
    decoupled=st.booleans(),
)
def test_bits_for_arbitrary_gradients_and_parameters(grads, params, block_size, decoupled):
    grad = torch.tensor(grads)
    param = torch.tensor(params[: len(grads)])
    state = moments(torch.randn(len(grads)), torch.rand(len(grads)), block_size)
    assert state.first_scales.numel() == block_count(len(grads), block_size)
    c = coefficients(decoupled=decoupled)
    check([param], [grad], [state], c)
    check([param], [grad], [state], c)
