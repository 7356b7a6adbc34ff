"""The kernel of a CUDA device for a distribution and dtype, and what raises."""

import pytest
import torch

from dist_rng.distributions import (
    AllIntegers,
    Bernoulli,
    BernoulliTensor,
    Exponential,
    FusedDropout,
    Integers,
    Normal,
    Uniform,
)
from dist_rng.philox.kernel_spec import PhiloxKind, kernel_spec


@pytest.mark.parametrize(
    ("draw", "dtype", "kind", "unroll"),
    [
        (Uniform(), torch.float32, PhiloxKind.UNIFORM, 4),
        (Uniform(), torch.float16, PhiloxKind.UNIFORM, 4),
        (Uniform(), torch.float64, PhiloxKind.UNIFORM, 2),
        (Normal(), torch.bfloat16, PhiloxKind.NORMAL, 4),
        (Normal(), torch.float64, PhiloxKind.NORMAL, 2),
        (Exponential(), torch.float64, PhiloxKind.EXPONENTIAL, 2),
        (Bernoulli(), torch.int64, PhiloxKind.BERNOULLI, 4),
        (Bernoulli(), torch.float64, PhiloxKind.BERNOULLI, 2),
        (Integers(0, 2**28 - 1), torch.int64, PhiloxKind.MODULO_32, 4),
        (Integers(0, 2**28), torch.int64, PhiloxKind.MODULO_64, 2),
        (Integers(-(2**63), 2**63 - 1), torch.int64, PhiloxKind.MODULO_64, 2),
        (AllIntegers(), torch.int32, PhiloxKind.MODULO_32, 4),
        (AllIntegers(), torch.int64, PhiloxKind.MODULO_64, 2),
        (AllIntegers(), torch.float64, PhiloxKind.MODULO_64, 2),
    ],
    ids=str,
)
def test_kind_and_elements_per_call(draw, dtype, kind, unroll):
    spec = kernel_spec(draw, dtype, 1000)
    assert (spec.kind, spec.access.unroll) == (kind, unroll)


def test_dropout_of_doubles_keeps_the_same_elements_with_a_float_threshold():
    p = 0.1
    threshold = kernel_spec(FusedDropout(p, 8), torch.bool, 8).a
    below = float(torch.nextafter(torch.tensor(threshold), torch.tensor(0.0)))
    assert below < 1.0 - p <= threshold
    assert kernel_spec(FusedDropout(p, 4), torch.bool, 8).a == float(torch.tensor(1.0 - p))


@pytest.mark.parametrize(
    ("draw", "dtype", "message"),
    [
        (Uniform(), torch.int64, "floating-point dtype"),
        (Normal(), torch.complex64, "dtype that torch draws"),
        (Bernoulli(), torch.uint32, "CUDA kernels draw"),
        (AllIntegers(), torch.uint16, "CUDA kernels draw"),
        (FusedDropout(), torch.float32, "mask of torch.bool"),
    ],
    ids=str,
)
def test_dtypes_that_torch_does_not_draw_raise(draw, dtype, message):
    with pytest.raises(TypeError, match=message):
        kernel_spec(draw, dtype, 8)


def test_arguments_out_of_range_raise():
    with pytest.raises(ValueError, match="a standard deviation of at least 0"):
        kernel_spec(Normal(0.0, -1.0), torch.float32, 8)
    with pytest.raises(ValueError, match="low < high"):
        kernel_spec(Integers(3, 3), torch.int64, 8)


def test_dropout_with_p_0_has_threshold_1():
    assert kernel_spec(FusedDropout(0.0, 4), torch.bool, 8).a == 1.0


def test_tensors_of_probabilities_are_accessed_four_at_a_time():
    access = kernel_spec(BernoulliTensor(), torch.float32, 8).access
    assert (access.vector, access.capped, access.advance) == (4, False, 12)
