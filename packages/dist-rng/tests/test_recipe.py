"""What a CUDA device does for a distribution and dtype, and what it refuses."""

import pytest
import torch

from dist_rng.draws import (
    AllIntegers,
    Bernoulli,
    BernoulliTensor,
    Exponential,
    FusedDropout,
    Integers,
    Normal,
    Uniform,
)
from dist_rng.recipe import Kind, recipe_of


@pytest.mark.parametrize(
    ("draw", "dtype", "kind", "unroll"),
    [
        (Uniform(), torch.float32, Kind.UNIFORM, 4),
        (Uniform(), torch.float16, Kind.UNIFORM, 4),
        (Uniform(), torch.float64, Kind.UNIFORM, 2),
        (Normal(), torch.bfloat16, Kind.NORMAL, 4),
        (Normal(), torch.float64, Kind.NORMAL, 2),
        (Exponential(), torch.float64, Kind.EXPONENTIAL, 2),
        (Bernoulli(), torch.int64, Kind.BERNOULLI, 4),
        (Bernoulli(), torch.float64, Kind.BERNOULLI, 2),
        (Integers(0, 2**28 - 1), torch.int64, Kind.MODULO_32, 4),
        (Integers(0, 2**28), torch.int64, Kind.MODULO_64, 2),
        (Integers(-(2**63), 2**63 - 1), torch.int64, Kind.MODULO_64, 2),
        (AllIntegers(), torch.int32, Kind.MODULO_32, 4),
        (AllIntegers(), torch.int64, Kind.MODULO_64, 2),
        (AllIntegers(), torch.float64, Kind.MODULO_64, 2),
    ],
    ids=str,
)
def test_kind_and_elements_per_call(draw, dtype, kind, unroll):
    recipe = recipe_of(draw, dtype, 1000)
    assert (recipe.kind, recipe.reach.unroll) == (kind, unroll)


@pytest.mark.parametrize(
    ("dtype", "modulus"),
    [
        (torch.bool, 2),
        (torch.uint8, 256),
        (torch.int8, 128),
        (torch.int16, 2**15),
        (torch.int32, 2**31),
        (torch.int64, 2**63),
        (torch.bfloat16, 2**8 + 1),
        (torch.float16, 2**11 + 1),
        (torch.float32, 2**24 + 1),
        (torch.float64, 2**53 + 1),
    ],
    ids=str,
)
def test_all_integers_are_those_the_dtype_holds(dtype, modulus):
    assert recipe_of(AllIntegers(), dtype, 8).modulus == modulus


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
    ],
)
@pytest.mark.filterwarnings("ignore:.*is out of bounds.*:UserWarning")
def test_bounds_move_to_what_a_float_holds_as_in_torch(low, high, dtype):
    recipe = recipe_of(Integers(low, high), dtype, 8)
    drawn = torch.empty(4096, dtype=dtype)
    drawn.random_(low, high, generator=torch.Generator().manual_seed(1))
    # The CPU moves the bounds in the same code, and draws floats as integers that it then casts.
    integers = torch.empty(4096, dtype=torch.int64)
    bounds = (recipe.base, recipe.base + recipe.modulus)
    integers.random_(*bounds, generator=torch.Generator().manual_seed(1))
    assert integers.to(dtype).equal(drawn)


def test_dropout_of_doubles_keeps_the_same_elements_with_a_float_threshold():
    p = 0.1
    threshold = recipe_of(FusedDropout(p, 8), torch.bool, 8).a
    below = float(torch.nextafter(torch.tensor(threshold), torch.tensor(0.0)))
    assert below < 1.0 - p <= threshold
    assert recipe_of(FusedDropout(p, 4), torch.bool, 8).a == float(torch.tensor(1.0 - p))


@pytest.mark.parametrize(
    ("draw", "dtype", "message"),
    [
        (Uniform(), torch.int64, "floating-point tensor"),
        (Normal(), torch.complex64, "no such tensor"),
        (Bernoulli(), torch.uint32, "CUDA kernels lack it"),
        (AllIntegers(), torch.uint16, "CUDA kernels lack it"),
        (FusedDropout(), torch.float32, "mask is torch.bool"),
    ],
    ids=str,
)
def test_dtypes_that_torch_does_not_draw(draw, dtype, message):
    with pytest.raises(TypeError, match=message):
        recipe_of(draw, dtype, 8)


@pytest.mark.parametrize(
    ("draw", "dtype"),
    [
        (Uniform(1.0, 0.0), torch.float32),
        (Uniform(0.0, 1e6), torch.float16),
        (Uniform(-60000.0, 60000.0), torch.float16),
        (Normal(0.0, -1.0), torch.float32),
        (Exponential(0.0), torch.float32),
        (Bernoulli(1.5), torch.float32),
        (Bernoulli(float("nan")), torch.float32),
        (FusedDropout(1.0), torch.bool),
        (Integers(3, 3), torch.int64),
        (Integers(0, 257), torch.uint8),
        (Integers(-1, 5), torch.uint64),
        (Integers(0, 3), torch.bool),
    ],
    ids=str,
)
def test_arguments_out_of_range(draw, dtype):
    with pytest.raises(ValueError, match="it takes"):
        recipe_of(draw, dtype, 8)


def test_probabilities_of_their_own_are_reached_four_at_a_time():
    reach = recipe_of(BernoulliTensor(), torch.float32, 8).reach
    assert (reach.vector, reach.capped, reach.advance) == (4, False, 12)
