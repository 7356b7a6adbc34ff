"""Which arguments raise, and which integers a dtype is drawn from."""

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
    all_integers,
    check_arguments,
    integer_range,
    largest_integer,
)


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        (torch.bool, 1),
        (torch.uint8, 255),
        (torch.int8, 127),
        (torch.int16, 2**15 - 1),
        (torch.uint16, 2**16 - 1),
        (torch.int32, 2**31 - 1),
        (torch.int64, 2**63 - 1),
        (torch.bfloat16, 2**8),
        (torch.float16, 2**11),
        (torch.float32, 2**24),
        (torch.float64, 2**53),
    ],
    ids=str,
)
def test_largest_integer_ends_the_consecutive_integers_of_the_dtype(dtype, largest):
    assert largest_integer(dtype) == largest
    values = all_integers(dtype)
    assert (values.base, values.modulus) == (0, largest + 1)


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (0, 65504, torch.float16),
        (-65504, 100, torch.float16),
        (-2051, 4099, torch.float16),
        (-1000, 1000, torch.bfloat16),
        (-(2**25) - 3, 2**26 + 5, torch.float32),
        (-(2**60) - 3, 2**61 + 129, torch.float64),
        (-5, 5, torch.float32),
        (-5, 5, torch.int8),
        (-(2**63), 2**63 - 1, torch.int64),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is out of bounds.*:UserWarning")
def test_bounds_move_to_values_of_the_dtype_as_in_torch(low, high, dtype):
    values = integer_range(Integers(low, high), dtype)
    drawn = torch.empty(4096, dtype=dtype)
    drawn.random_(low, high, generator=torch.Generator().manual_seed(1))
    # torch draws floats as integers that it then casts.
    integers = torch.empty(4096, dtype=torch.int64)
    bounds = (values.base, values.base + values.modulus)
    integers.random_(*bounds, generator=torch.Generator().manual_seed(1))
    assert integers.to(dtype).equal(drawn)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "message"),
    [
        (3, 3, torch.int64, "low < high"),
        (0, 257, torch.uint8, "bounds that torch.uint8 represents"),
        (-129, 5, torch.int8, "bounds that torch.int8 represents"),
        (-1, 5, torch.uint64, "bounds that torch.uint64 represents"),
        (0, 2**63 + 1, torch.uint64, "bounds that torch.uint64 represents"),
        (0, 3, torch.bool, "bounds that torch.bool represents"),
        (4105, 4106, torch.float16, "low < high as torch.float16"),
        (-(2**63), 2**63, torch.int64, "fewer than"),
    ],
)
def test_integers_that_cannot_be_drawn_raise(low, high, dtype, message):
    with pytest.raises(ValueError, match=f"expected {message}"):
        integer_range(Integers(low, high), dtype)


@pytest.mark.parametrize(
    ("draw", "dtype"),
    [
        (Uniform(1.0, 0.0), torch.float32),
        (Uniform(0.0, 1e6), torch.float16),
        (Uniform(-1e6, 0.0), torch.float16),
        (Uniform(-60000.0, 60000.0), torch.float16),
        (Normal(0.0, -1.0), torch.float32),
        (Normal(0.0, float("nan")), torch.float32),
        (Exponential(0.0), torch.float32),
        (Bernoulli(1.5), torch.float32),
        (Bernoulli(-0.5), torch.float32),
        (Bernoulli(float("nan")), torch.float32),
        (FusedDropout(1.0), torch.bool),
        (FusedDropout(-0.1), torch.bool),
    ],
    ids=str,
)
def test_arguments_out_of_range_raise(draw, dtype):
    with pytest.raises(ValueError, match=r"expected .*, got"):
        check_arguments(draw, dtype)


@pytest.mark.parametrize(
    "draw",
    [
        *(Uniform(2.0, 2.0), Normal(0.0, 0.0), Exponential(1e-30), Bernoulli(0.0), Bernoulli(1.0)),
        *(FusedDropout(0.0), BernoulliTensor(), AllIntegers()),
    ],
    ids=str,
)
def test_arguments_at_the_limits_of_their_range_are_accepted(draw):
    check_arguments(draw, torch.float32)
