"""The compiled function that draws a distribution into a dtype on a CPU."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from dist_rng import _core
from dist_rng._compat import cpu_release
from dist_rng.distributions import (
    AllIntegers,
    Bernoulli,
    BernoulliTensor,
    Cauchy,
    Distribution,
    Exponential,
    FusedDropout,
    Geometric,
    Integers,
    LogNormal,
    Normal,
    Uniform,
    check_arguments,
    integer_range,
)

_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NUMBERS = (*_FLOATING, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COMMON = (*_NUMBERS, torch.bool)
_EVERY = (*_COMMON, torch.uint16, torch.uint32, torch.uint64)
_SUPPORTED: dict[type, tuple[torch.dtype, ...]] = {
    Uniform: _FLOATING,
    Normal: _FLOATING,
    Exponential: _FLOATING,
    Cauchy: _FLOATING,
    Geometric: _NUMBERS,
    LogNormal: _FLOATING,
    Bernoulli: _COMMON,
    BernoulliTensor: _COMMON,
    AllIntegers: _COMMON,
    Integers: _EVERY,
}
CORE_DTYPES = {dtype: getattr(_core.Dtype, str(dtype).removeprefix("torch.")) for dtype in _EVERY}


@dataclass(frozen=True)
class CompiledLayout:
    """The compiled form of a region and of the strides of its local tensor.

    Attributes:
        grid: the walk over the local elements.
        global_numel: number of elements of the global tensor.
        contiguous: whether the global tensor is contiguous in torch's sense.
    """

    grid: _core.LocalGrid
    global_numel: int
    contiguous: bool


# (layout, address of the generator's state, of the local tensor, of the local probabilities)
CpuDraw = Callable[[CompiledLayout, int, int, int], None]


@lru_cache(maxsize=4096)
def cpu_draw(draw: Distribution, dtype: torch.dtype, probabilities: torch.dtype | None) -> CpuDraw:
    """Returns the function that draws ``draw`` into local tensors of ``dtype``.

    Args:
        draw: the distribution.
        dtype: of the local tensor.
        probabilities: dtype of the probabilities; None unless ``draw`` takes them.

    Raises:
        TypeError: torch's CPU kernels do not draw this into this dtype.
        ValueError: an argument is out of range.
    """
    _check_types(draw, dtype, probabilities)
    core = CORE_DTYPES[dtype]
    check_arguments(draw, dtype)
    match draw:
        case Uniform(low, high):
            fused, release = torch_uses_fma(), cpu_release()
            return lambda layout, state, data, _: _core.uniform(
                state, data, core, layout.grid, layout.global_numel, low, high, fused, release
            )
        case Normal(mean, std):
            return _normal(mean, std, core)
        case Exponential(rate):
            return lambda layout, state, data, _: _core.exponential(
                state, data, core, layout.grid, layout.global_numel, rate
            )
        case Cauchy(median, sigma):
            fused = torch_uses_fma()
            return lambda layout, state, data, _: _core.cauchy(
                state, data, core, layout.grid, layout.global_numel, median, sigma, fused
            )
        case Geometric(p):
            return lambda layout, state, data, _: _core.geometric(
                state, data, core, layout.grid, layout.global_numel, p
            )
        case LogNormal(mean, std):
            fused = torch_uses_fma()
            return lambda layout, state, data, _: _core.log_normal(
                state, data, core, layout.grid, layout.global_numel, mean, std, fused
            )
        case Bernoulli(p):
            return lambda layout, state, data, _: _core.bernoulli(
                state, data, core, layout.grid, layout.global_numel, p
            )
        case BernoulliTensor():
            assert probabilities is not None
            return _bernoulli_tensor(core, CORE_DTYPES[probabilities])
        case Integers():
            values = integer_range(draw, dtype)
            return lambda layout, state, data, _: _core.integers(
                state, data, core, layout.grid, layout.global_numel, values.modulus, values.base
            )
        case AllIntegers():
            return lambda layout, state, data, _: _core.all_integers(
                state, data, core, layout.grid, layout.global_numel
            )
        case FusedDropout():  # pragma: no cover - _check_types raises for it
            raise AssertionError(draw)


def torch_uses_fma() -> bool:
    """Returns whether torch's kernels compute ``a * b + c`` with one rounding on this machine.

    The kernels for AVX2 and AVX-512 do, and those of the DEFAULT capability do not (PyTorch selects
    by the processor and by ATEN_CPU_CAPABILITY). Compilers for aarch64 contract everywhere.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    return capability != "DEFAULT" or platform.machine() == "aarch64"


def _normal(mean: float, std: float, core: _core.Dtype) -> CpuDraw:
    fused, release = torch_uses_fma(), cpu_release()

    def run(layout: CompiledLayout, state: int, data: int, _: int) -> None:
        blocks = layout.contiguous and layout.global_numel >= 16
        _core.normal(
            state,
            data,
            core,
            layout.grid,
            layout.global_numel,
            mean,
            std,
            blocks,
            fused,
            release,
        )

    return run


def _bernoulli_tensor(core: _core.Dtype, core_probabilities: _core.Dtype) -> CpuDraw:
    def run(layout: CompiledLayout, state: int, data: int, probabilities: int) -> None:
        numel = layout.global_numel
        valid = _core.bernoulli_tensor(
            state, data, core, layout.grid, numel, probabilities, core_probabilities
        )
        if not valid:
            raise ValueError("BernoulliTensor: expected probabilities in [0, 1], got others")

    return run


def _check_types(draw: Distribution, dtype: torch.dtype, probabilities: torch.dtype | None) -> None:
    name = type(draw).__name__
    if type(draw) not in _SUPPORTED:
        raise TypeError(f"expected a distribution of CPUs, got {name}; draw a Bernoulli mask")
    supported = _SUPPORTED[type(draw)]
    if dtype not in supported:
        allowed = ", ".join(str(each).removeprefix("torch.") for each in supported)
        raise TypeError(
            f"{name}: expected one of {allowed}, into which torch's CPU kernels draw it, got"
            f" {dtype}; draw into one of those and convert"
        )
    if (probabilities is not None) != isinstance(draw, BernoulliTensor):
        raise TypeError(f"{name}: expected probabilities with BernoulliTensor, and only with it")
    if probabilities is not None and probabilities not in _FLOATING:
        raise TypeError(f"{name}: expected floating-point probabilities, got {probabilities}")
