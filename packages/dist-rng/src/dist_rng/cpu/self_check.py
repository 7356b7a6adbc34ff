"""The self-check: compares a small draw with torch's, once per operation and dtype.

torch selects its kernels by the processor, and a build may use another random library (MKL's, on
Intel processors, until pytorch#146174). A stream that dist-rng does not reproduce must be an error,
never other numbers.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dist_rng import _core
from dist_rng.cpu.draws import CompiledLayout, cpu_draw
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
)

_SEED = 0x5EED
# For normal_, 107 is six blocks of 16 and a remainder; 11 is the serial path with a cached sample,
# which log_normal_ has for both.
_SIZES = (107, 11)
# With these arguments one rounding more or less changes a value.
_SAMPLES: dict[type, tuple[Distribution, ...]] = {
    Uniform: (Uniform(-0.3, 0.55),),
    Normal: (Normal(0.3, 1.7),),
    Exponential: (Exponential(1.3),),
    Cauchy: (Cauchy(0.3, 1.7),),
    Geometric: (Geometric(0.3),),
    LogNormal: (LogNormal(0.3, 1.7),),
    Bernoulli: (Bernoulli(0.3),),
    BernoulliTensor: (BernoulliTensor(),),
    AllIntegers: (AllIntegers(),),
    Integers: (Integers(0, 2), Integers(3, 100), Integers(0, 2**31 - 1)),
}


@cache
def check(kind: type, dtype: torch.dtype, probabilities: torch.dtype | None) -> None:
    """Compares a small draw with torch's.

    Args:
        kind: the class of the distribution.
        dtype: dtype of the tensor that is drawn.
        probabilities: dtype of the probabilities of BernoulliTensor, else None.

    Raises:
        RuntimeError: values or generator states differ.
    """
    with ExitStack() as without_modes:
        # The modes of the caller may be those that called this function.
        without_modes.enter_context(_disable_current_modes())
        without_modes.enter_context(torch._C.DisableTorchFunction())
        without_modes.enter_context(torch.no_grad())
        for draw in _samples(kind, dtype):
            for numel in _SIZES:
                _compare(draw, dtype, probabilities, numel)


def _samples(kind: type, dtype: torch.dtype) -> tuple[Distribution, ...]:
    if kind is not Integers or dtype in (torch.int32, torch.int64, torch.uint32, torch.uint64):
        return _SAMPLES[kind]
    return _SAMPLES[kind][: 1 if dtype == torch.bool else 2]


def _compare(
    draw: Distribution, dtype: torch.dtype, probabilities: torch.dtype | None, numel: int
) -> None:
    generator = torch.Generator("cpu")
    generator.manual_seed(_SEED)
    state = generator.get_state()
    expected = torch.zeros(numel, dtype=dtype, device="cpu")
    actual = torch.zeros(numel, dtype=dtype, device="cpu")
    dtype_of_values = probabilities or torch.float32
    probability_values = torch.linspace(0, 1, numel, dtype=dtype_of_values, device="cpu")
    _torch_draw(draw, probability_values, generator)(expected)
    layout = CompiledLayout(_core.LocalGrid([[(0, numel)]], [1], [1]), numel, contiguous=True)
    cpu_draw(draw, dtype, probabilities)(
        layout, state.data_ptr(), actual.data_ptr(), probability_values.data_ptr()
    )
    same_values = torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    if same_values and torch.equal(state, generator.get_state()):
        return
    raise RuntimeError(
        f"torch draws {type(draw).__name__} into {dtype} on this machine differently from what"
        f" dist-rng reproduces: expected the values and the generator state of torch, got"
        f" {'other values' if not same_values else 'another generator state'} for {draw} and"
        f" {numel} elements (torch {torch.__version__}, capability"
        f" {torch.backends.cpu.get_cpu_capability()}, {_core.instruction_set()} kernels). dist-rng"
        " cannot draw shards of it on this machine; please report this message"
    )


def _torch_draw(
    draw: Distribution, probability_values: torch.Tensor, generator: torch.Generator
) -> Callable[[torch.Tensor], torch.Tensor]:
    match draw:
        case Uniform(low, high):
            return lambda tensor: tensor.uniform_(low, high, generator=generator)
        case Normal(mean, std):
            return lambda tensor: tensor.normal_(mean, std, generator=generator)
        case Exponential(rate):
            return lambda tensor: tensor.exponential_(rate, generator=generator)
        case Cauchy(median, sigma):
            return lambda tensor: tensor.cauchy_(median, sigma, generator=generator)
        case Geometric(p):
            return lambda tensor: tensor.geometric_(p, generator=generator)
        case LogNormal(mean, std):
            return lambda tensor: tensor.log_normal_(mean, std, generator=generator)
        case Bernoulli(p):
            return lambda tensor: tensor.bernoulli_(p, generator=generator)
        case BernoulliTensor():
            return lambda tensor: tensor.bernoulli_(probability_values, generator=generator)
        case Integers(low, high):
            return lambda tensor: tensor.random_(low, high, generator=generator)
        case AllIntegers():
            return lambda tensor: tensor.random_(generator=generator)
        case FusedDropout():  # pragma: no cover - cpu_draw raises for it
            raise AssertionError(draw)
