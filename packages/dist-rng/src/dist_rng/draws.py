"""What can be drawn: one small value per distribution, the same for every backend.

A backend takes ``(local, region, distribution, generator)`` and fills ``local`` with what one
device would have drawn there. The names of the arguments are torch's.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Uniform:
    """``Tensor.uniform_(low, high)``; floating point."""

    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Normal:
    """``Tensor.normal_(mean, std)``; floating point."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Bernoulli:
    """``Tensor.bernoulli_(p)`` with one probability; every dtype."""

    p: float = 0.5


@dataclass(frozen=True)
class BernoulliTensor:
    """``torch.bernoulli(probabilities)`` and ``Tensor.bernoulli_(probabilities)``.

    The backend takes the local probabilities beside the output: same region, floating point.
    """


@dataclass(frozen=True)
class Exponential:
    """``Tensor.exponential_(rate)``; floating point."""

    rate: float = 1.0


@dataclass(frozen=True)
class Integers:
    """``Tensor.random_(low, high)`` and ``torch.randint(low, high)``: ``low <= x < high``."""

    low: int
    high: int


@dataclass(frozen=True)
class AllIntegers:
    """``Tensor.random_()``: every value that the dtype represents exactly and is >= 0."""


@dataclass(frozen=True)
class FusedDropout:
    """``native_dropout(input, p)`` on CUDA: one mask element per input element.

    CPUs and in-place dropout draw a ``Bernoulli`` mask instead.

    Attributes:
        p: the probability of a zero.
        input_itemsize: bytes per element of the input, which decides how the kernel draws;
            the local tensor that is filled is the mask.
    """

    p: float = 0.5
    input_itemsize: int = 4


Distribution = (
    Uniform
    | Normal
    | Bernoulli
    | BernoulliTensor
    | Exponential
    | Integers
    | AllIntegers
    | FusedDropout
)
