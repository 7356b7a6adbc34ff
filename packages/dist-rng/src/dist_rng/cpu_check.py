"""The self-check: torch's own draw against ours, once per operation and dtype.

torch chooses its kernels by the processor, and a build may use another random library (MKL's, on
Intel processors, until pytorch#146174). A stream that is not the one dist-rng reproduces must be
an error, never other numbers.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dist_rng import _core
from dist_rng.cpu_draws import Plan, draw_of
from dist_rng.draws import (
    AllIntegers,
    Bernoulli,
    BernoulliTensor,
    Distribution,
    Exponential,
    FusedDropout,
    Integers,
    Normal,
    Uniform,
)

_SEED = 0x5EED
# 107: six blocks of 16 and a tail, for normal_; 11: its serial path, with a sample left over.
_SIZES = (107, 11)
# Arguments that a rounding more or less would show in.
_SAMPLES: dict[type, tuple[Distribution, ...]] = {
    Uniform: (Uniform(-0.3, 0.55),),
    Normal: (Normal(0.3, 1.7),),
    Exponential: (Exponential(1.3),),
    Bernoulli: (Bernoulli(0.3),),
    BernoulliTensor: (BernoulliTensor(),),
    AllIntegers: (AllIntegers(),),
    Integers: (Integers(0, 2), Integers(3, 100), Integers(0, 2**31 - 1)),
}


@cache
def check(kind: type, dtype: torch.dtype, probabilities: torch.dtype | None) -> None:
    """Compare a small draw with torch's own.

    Args:
        kind: the class of the distribution.
        dtype: of the tensor that is drawn.
        probabilities: dtype of the probabilities of BernoulliTensor, else None.

    Raises:
        RuntimeError: values or generator states differ.
    """
    with ExitStack() as undisturbed:
        # The caller may stand inside the very modes that brought it here.
        undisturbed.enter_context(_disable_current_modes())
        undisturbed.enter_context(torch._C.DisableTorchFunction())
        undisturbed.enter_context(torch.no_grad())
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
    chances = torch.linspace(0, 1, numel, dtype=probabilities or torch.float32, device="cpu")
    _torch_draw(draw, chances, generator)(expected)
    plan = Plan(_core.Grid([[(0, numel)]], [1], [1]), numel, contiguous=True)
    draw_of(draw, dtype, probabilities)(
        plan, state.data_ptr(), actual.data_ptr(), chances.data_ptr()
    )
    same_values = torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    if same_values and torch.equal(state, generator.get_state()):
        return
    raise RuntimeError(
        f"torch draws {type(draw).__name__} into {dtype} on this machine differently from what"
        f" dist-rng reproduces: {'other values' if not same_values else 'another generator state'}"
        f" for {draw} and {numel} elements (torch {torch.__version__}, capability"
        f" {torch.backends.cpu.get_cpu_capability()}, {_core.instruction_set()} kernels). No shard"
        " can be drawn correctly; please report this line"
    )


def _torch_draw(
    draw: Distribution, chances: torch.Tensor, generator: torch.Generator
) -> Callable[[torch.Tensor], torch.Tensor]:
    match draw:
        case Uniform(low, high):
            return lambda tensor: tensor.uniform_(low, high, generator=generator)
        case Normal(mean, std):
            return lambda tensor: tensor.normal_(mean, std, generator=generator)
        case Exponential(rate):
            return lambda tensor: tensor.exponential_(rate, generator=generator)
        case Bernoulli(p):
            return lambda tensor: tensor.bernoulli_(p, generator=generator)
        case BernoulliTensor():
            return lambda tensor: tensor.bernoulli_(chances, generator=generator)
        case Integers(low, high):
            return lambda tensor: tensor.random_(low, high, generator=generator)
        case AllIntegers():
            return lambda tensor: tensor.random_(generator=generator)
        case FusedDropout():  # pragma: no cover - draw_of refuses it
            raise AssertionError(draw)
