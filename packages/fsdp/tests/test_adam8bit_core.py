"""The compiled step against NumPy: without torch, so that every supported Python runs it.

`test_adam8bit_update` compares it with its reference in torch operators, on many more inputs.
"""

import importlib.machinery
import importlib.util
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest


def load():
    """Returns ``fsdp.optim._core``; where there is no torch, without its package."""
    if importlib.util.find_spec("torch") is not None:
        from fsdp.optim import _core

        return _core
    folder = Path(importlib.util.find_spec("fsdp").submodule_search_locations[0]) / "optim"
    file = folder / f"_core{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    spec = importlib.util.spec_from_file_location("fsdp.optim._core", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


core = load()
F32 = np.float32
BLOCK = 64


@pytest.fixture(autouse=True, scope="module", params=core.available_kernels())
def kernels(request):
    before = core.active_kernels()
    core.select_kernels(request.param)
    yield
    core.select_kernels(before)


class Book:
    """A code book of dynamic quantization; see ``fsdp.optim.adam8bit.quantization``."""

    def __init__(self, *, signed):
        magnitudes = {Fraction(0), Fraction(1)}
        for zeros in range(7):
            steps = 2 ** (6 - zeros + (not signed))
            for i in range(steps):
                value = Fraction(1, 10) + (i + Fraction(1, 2)) * Fraction(9, 10) / steps
                magnitudes.add(value / 10**zeros)
        positive = [float(value) for value in sorted(magnitudes)]
        negative = [-value for value in reversed(positive[1:-1])] if signed else []
        self.values = np.array(negative + positive, F32)
        self.zero = len(negative)
        upper = self.values[self.zero :].astype(np.float64)
        self.boundaries = ((upper[:-1] + upper[1:]) / 2).astype(F32)
        self.table = core.CodeBookTable(self.values.tolist(), self.boundaries.tolist(), self.zero)

    def quantize(self, values):
        """Returns codes and scales of whole blocks whose largest magnitudes are normal numbers."""
        blocks = values.reshape(-1, BLOCK)
        scales = np.abs(blocks).max(1)
        units = (blocks * (F32(1) / scales)[:, None]).ravel()
        codes = np.searchsorted(self.boundaries, np.abs(units))
        codes = np.where(units < 0, -np.minimum(codes, self.zero), codes) + self.zero
        return codes.astype(np.uint8), scales

    def dequantize(self, codes, scales):
        return self.values[codes] * scales.repeat(BLOCK)


SIGNED, UNSIGNED = Book(signed=True), Book(signed=False)
# beta1, 1 - beta1, beta2, 1 - beta2, step size, correction of the root, eps, decay, L2 factor.
DECOUPLED = (0.9, 1 - 0.9, 0.95, 1 - 0.95, 1e-2, 1 / math.sqrt(1 - 0.95**3), 1e-8, 0.999, 0.0)
L2 = (*DECOUPLED[:7], 1.0, 0.1)


def expected(param, grad, first, second, numbers):
    b1, o1, b2, o2, size, root, eps, decay, l2 = map(F32, numbers)
    grad = grad + param * l2 if l2 else grad
    first = first * b1 + grad * o1
    second = second * b2 + (grad * grad) * o2
    denominator = np.sqrt(second) * root + eps
    return param * decay - (first * size) / denominator, first, second


def step(arrays, numbers, threads=1):
    """Runs the compiled step on tuples of arrays; scales of None are address 0."""
    addresses = [
        (*(0 if each is None else each.ctypes.data for each in one), one[0].size) for one in arrays
    ]
    coefficients = core.Coefficients(*numbers)
    return core.step(addresses, coefficients, BLOCK, SIGNED.table, UNSIGNED.table, threads)


def inputs(count, seed):
    random = np.random.default_rng(seed)
    param, grad, first = (random.standard_normal(count).astype(F32) for _ in range(3))
    return param, grad, first, np.square(random.standard_normal(count)).astype(F32)


@pytest.mark.parametrize("numbers", [DECOUPLED, L2], ids=["decoupled", "L2"])
@pytest.mark.parametrize("count", [1, 31, 4 * BLOCK])
def test_a_step_with_wide_moments(numbers, count):
    param, grad, first, second = inputs(count, count)
    wanted = expected(param, grad, first, second, numbers)
    assert step([(param, grad, first, None, second, None)], numbers) == []
    for got, want in zip((param, first, second), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("numbers", [DECOUPLED, L2], ids=["decoupled", "L2"])
def test_a_step_with_8_bit_moments_of_several_parameters(numbers, threads):
    arrays, wanted = [], []
    for seed, blocks in enumerate((1, 3, 200)):
        param, grad, first, second = inputs(blocks * BLOCK, seed)
        m, m_scales = SIGNED.quantize(first)
        v, v_scales = UNSIGNED.quantize(second)
        before = SIGNED.dequantize(m, m_scales), UNSIGNED.dequantize(v, v_scales)
        updated, first, second = expected(param, grad, *before, numbers)
        wanted.append((updated, grad.copy(), *SIGNED.quantize(first), *UNSIGNED.quantize(second)))
        arrays.append((param, grad, m, m_scales, v, v_scales))
    assert step(arrays, numbers, threads) == []
    for got, want in zip(arrays, wanted, strict=True):
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_block_that_is_not_finite_is_reported():
    arrays = []
    for seed in range(2):
        param, grad, first, second = inputs(2 * BLOCK, seed)
        grad[BLOCK] = np.inf if seed else 0
        arrays.append((param, grad, *SIGNED.quantize(first), *UNSIGNED.quantize(second)))
    assert step(arrays, DECOUPLED) == [1]
    _, _, _, m_scales, _, _ = arrays[1]
    assert np.isnan(m_scales[1])
    assert np.isfinite(m_scales[0])


def test_wrong_code_books_are_refused():
    with pytest.raises(ValueError, match="256 values"):
        core.CodeBookTable([0.0, 1.0], [0.5], 0)
