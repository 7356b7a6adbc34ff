import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard

from testkit import assert_bitwise, assert_close, assert_same_tensor, assert_ulp, fake_mesh

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALL = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
ALL = (*ALL, torch.complex128, torch.float8_e4m3fn)
NAN = float("nan")
INF = float("inf")


def fails(check, actual, expected, *args, **kwargs):
    with pytest.raises(AssertionError) as caught:
        check(actual, expected, *args, **kwargs)
    return str(caught.value)


def of_bits(*bits):
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


# --- all three


def exactly(check):
    def bound(actual, expected, what=""):
        tolerances = {assert_ulp: (0,), assert_close: (0.0, 0.0), assert_bitwise: ()}[check]
        check(actual, expected, *tolerances, what=what)

    return bound


every_check = pytest.mark.parametrize(
    "check",
    [exactly(c) for c in (assert_bitwise, assert_ulp, assert_close)],
    ids=["bitwise", "ulp", "close"],
)


@every_check
def test_equal_tensors_pass_whatever_their_strides_and_gradients(check):
    tensor = torch.arange(6.0).view(2, 3)
    check(tensor, tensor.clone())
    check(tensor.t(), tensor.t().contiguous())
    check(tensor.clone().requires_grad_(), tensor)
    check(torch.empty(0, 3), torch.empty(0, 3))
    check(torch.tensor(2.0), torch.tensor(2.0))


@every_check
def test_one_different_element_fails_and_is_located(check):
    expected = torch.arange(6.0).view(2, 3)
    actual = expected.clone()
    actual[1, 2] = 7.0
    message = fails(check, actual, expected, what="wq")
    assert message.startswith("wq: 1 of 6 elements differ")
    assert "first at [1, 2]: actual 7.0 (0x40e00000), expected 5.0 (0x40a00000)" in message
    assert "difference 2, 4194304 ulp" in message


@every_check
def test_scalars_are_located_too(check):
    message = fails(check, torch.tensor(1.0), torch.tensor(2.0))
    assert "1 of 1 elements differ" in message
    assert "first at []" in message


@every_check
def test_first_and_worst_are_told_apart(check):
    expected = torch.zeros(4)
    actual = torch.tensor([0.0, 1.0, -3.0, 2.0])
    message = fails(check, actual, expected)
    assert "3 of 4" in message
    assert "first at [1]: actual 1.0" in message
    assert "worst at [2]: actual -3.0" in message


@every_check
def test_dtype_and_shape_come_first(check):
    one = torch.ones(2, 3)
    assert fails(check, one.double(), one, what="x") == (
        "x: dtype is torch.float64, expected torch.float32"
    )
    assert fails(check, one, torch.ones(3)) == "shape is (2, 3), expected (3,)"
    fails(check, torch.ones(1, 3), torch.ones(3))


@every_check
def test_a_nan_against_a_number_fails(check):
    for actual, expected in ((NAN, 1.0), (1.0, NAN), (NAN, INF)):
        message = fails(check, torch.tensor([actual]), torch.tensor([expected]))
        assert "difference inf, no finite number of ulp" in message


@every_check
def test_an_infinity_equals_only_itself(check):
    check(torch.tensor([INF, -INF]), torch.tensor([INF, -INF]))
    largest = torch.finfo(torch.float32).max
    for actual, expected in ((INF, -INF), (INF, largest), (largest, INF), (-INF, 0.0)):
        fails(check, torch.tensor([actual]), torch.tensor([expected]))


@every_check
def test_what_is_no_tensor_is_refused(check):
    with pytest.raises(TypeError, match=r"actual is a list; give a torch\.Tensor"):
        check([1.0], torch.ones(1))
    with pytest.raises(TypeError, match="expected is a float"):
        check(torch.ones(1), 1.0)


@every_check
def test_dtensors_on_either_side_stand_for_their_full_tensor(check):
    with fake_mesh((2,)) as mesh:
        plain = torch.arange(3.0)
        wrapped = DTensor.from_local(plain.clone(), mesh, [Replicate()])
        check(wrapped, plain)
        check(plain, wrapped)
        check(wrapped, wrapped)
        fails(check, wrapped, plain + 1)


# --- bitwise


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_bitwise_covers_the_dtype(dtype):
    zeros = torch.zeros(3, dtype=dtype)
    assert_bitwise(zeros, torch.zeros(3, dtype=dtype))
    other = torch.tensor([0, 0, 1]).to(dtype)
    assert "1 of" in fails(assert_bitwise, other, zeros)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bitwise_tells_zeros_apart(dtype):
    message = fails(
        assert_bitwise,
        torch.tensor([1.0, -0.0], dtype=dtype),
        torch.tensor([1.0, 0.0], dtype=dtype),
    )
    assert "worst at [1]: actual -0.0 (0x80" in message
    assert "difference 0, 0 ulp" in message


def test_bitwise_compares_the_payload_of_nans():
    quiet, other, negative = of_bits(0x7FC00000), of_bits(0x7FC00001), of_bits(-0x400000)
    assert_bitwise(quiet, quiet.clone())
    fails(assert_bitwise, quiet, other)
    fails(assert_bitwise, quiet, negative)


def test_bitwise_sees_the_imaginary_part_of_views():
    tensor = torch.tensor([1 + 2j, 3 + 4j])
    assert_bitwise(tensor.conj(), torch.tensor([1 - 2j, 3 - 4j]))
    assert "first at [0, 1]: actual 2.0" in fails(assert_bitwise, tensor, tensor.conj())


def test_bitwise_shows_large_integers_exactly():
    message = fails(assert_bitwise, torch.tensor([2**60 + 1]), torch.tensor([2**60]))
    assert "actual 1152921504606846977" in message
    assert "difference 1" in message


# --- ulp


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("start", [1.0, -1.0, 0.0, 3.0])
def test_ulp_counts_representable_numbers(dtype, start):
    expected = torch.tensor([start], dtype=dtype)
    actual = expected
    for _ in range(3):
        actual = torch.nextafter(actual, torch.tensor([INF], dtype=dtype))
    assert_ulp(actual, expected, 3)
    assert_ulp(expected, actual, 3)
    assert "3 ulp" in fails(assert_ulp, actual, expected, 2)
    fails(assert_ulp, expected, actual, 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ulp_counts_across_zero(dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # subnormal
    below, above = torch.tensor([-smallest], dtype=dtype), torch.tensor([smallest], dtype=dtype)
    assert_ulp(below, above, 2)
    fails(assert_ulp, below, above, 1)
    assert_ulp(torch.tensor([-0.0], dtype=dtype), torch.tensor([0.0], dtype=dtype), 0)


def test_ulp_does_not_overflow():
    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    message = fails(assert_ulp, largest, -largest, 2**62)
    assert "no finite number of ulp" in message


def test_ulp_accepts_any_nan_for_a_nan():
    assert_ulp(of_bits(0x7FC00000), of_bits(-0x3FFFFF), 0)


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_ulp_zero_is_equality(a, b):
    actual, expected = torch.tensor([a]), torch.tensor([b])
    if a == b:
        assert_ulp(actual, expected, 0)
    else:
        fails(assert_ulp, actual, expected, 0)


def test_ulp_bad_input():
    with pytest.raises(ValueError, match="max_ulp=-1"):
        assert_ulp(torch.ones(1), torch.ones(1), -1)
    with pytest.raises(TypeError, match=r"torch.int64 has no ulp here.*use assert_bitwise"):
        assert_ulp(torch.ones(1).long(), torch.ones(1).long(), 1)


# --- close


def test_close_adds_both_tolerances():
    expected = torch.tensor([10.0, -10.0], dtype=torch.float64)
    for error in (1.25, -1.25):
        assert_close(expected + error, expected, 0.1, 0.25)
        assert "2 of 2" in fails(assert_close, expected + error, expected, 0.1, 0.2)
        fails(assert_close, expected + error, expected, 0.09, 0.25)


def test_close_measures_against_expected():
    small, large = torch.tensor([1.0]), torch.tensor([2.0])
    assert_close(small, large, 0.5, 0.0)
    fails(assert_close, large, small, 0.5, 0.0)


def test_close_does_not_round_in_the_tensors_dtype():
    expected = torch.tensor([256.0], dtype=torch.bfloat16)
    actual = torch.tensor([258.0], dtype=torch.bfloat16)
    fails(assert_close, actual, expected, 0.0, 1.0)
    assert_close(actual, expected, 0.0, 2.0)


def test_close_is_exact_for_integers():
    fails(assert_close, torch.tensor([2**60 + 1]), torch.tensor([2**60]), 0.0, 0.0)
    lowest, highest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    fails(assert_close, torch.tensor([lowest]), torch.tensor([highest]), 0.0, 1e18)


def test_close_accepts_any_nan_for_a_nan():
    assert_close(of_bits(0x7FC00000), of_bits(0x7FC00001), 0.0, 0.0)


@pytest.mark.parametrize(("rtol", "atol"), [(-1.0, 0.0), (0.0, -1.0), (math.nan, 0.0)])
def test_close_bad_tolerances(rtol, atol):
    with pytest.raises(ValueError, match="must not be negative or NaN"):
        assert_close(torch.ones(1), torch.ones(1), rtol, atol)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.t().contiguous().t(),  # strides
        lambda x: x.clone().requires_grad_(),
        lambda x: x + 1,
        lambda x: x.view(4, 4),  # a view
        lambda x: None,
    ],
    ids=["strides", "requires_grad", "values", "view", "none"],
)
def test_same_tensors_differ_in_nothing_that_can_be_asked(other):
    x = torch.arange(16.0).reshape(4, 4).clone()
    assert_same_tensor(x.clone(), x)
    assert_same_tensor(None, None)
    with pytest.raises(AssertionError, match="the one"):
        assert_same_tensor(other(x), x, "the one")


def test_same_dtensors_have_one_spec_and_local_tensors():
    with fake_mesh((2,)) as mesh:
        local = torch.ones(4, 2)
        placed = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        assert_same_tensor(DTensor.from_local(local, mesh, [Shard(0)], run_check=False), placed)
        for values, placement in ((local, Shard(1)), (local * 2, Shard(0))):
            other = DTensor.from_local(values, mesh, [placement], run_check=False)
            with pytest.raises(AssertionError):
                assert_same_tensor(other, placed)
