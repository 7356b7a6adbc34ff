"""The key in C++ against the key in Python, and that different calls have different keys."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtensor_rules
from dtensor_rules import _core
from dtensor_rules.inspect import reference
from testkit import fake_mesh

aten = torch.ops.aten
INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@pytest.fixture(scope="module")
def tensors():
    with fake_mesh((2,)) as mesh, dtensor_rules.enabled():
        shapes = [(4, 4), (4, 6)]
        yield [
            distribute_tensor(torch.ones(shape), mesh, [placement])
            for shape, placement in itertools.product(shapes, (Shard(0), Shard(1), Replicate()))
        ]


def agree(op, *arguments):
    words = _core.key_words(op, arguments)
    assert words == reference.key_words(op, words[0], arguments)
    return tuple(words)


def test_tensors_lists_and_missing_ones(tensors):
    a, b, *_ = tensors
    keys = [
        agree(aten.cat.default, [a, b], 0),
        agree(aten.cat.default, [b, a], 0),
        agree(aten.cat.default, [a, b, b], 0),
        agree(aten.cat.default, [a, b], 1),
        agree(aten.cat.default, [a], 0),
        agree(aten.clamp.Tensor, a, None, b),
        agree(aten.clamp.Tensor, a, b, None),
        agree(aten.native_layer_norm.default, a, [4], b, None, 1e-5),
        agree(aten.native_layer_norm.default, a, [4], None, b, 1e-5),
        agree(aten.index.Tensor, a, [None, b]),
        agree(aten.index.Tensor, a, [b, None]),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("pair", list(itertools.combinations(range(6), 2)), ids=str)
def test_tensors_of_different_specs_have_different_keys(tensors, pair):
    one, other = (agree(aten.neg.default, tensors[index]) for index in pair)
    assert one != other


@settings(max_examples=300, deadline=None)
@given(st.lists(INTS, max_size=6), st.lists(INTS, max_size=6))
def test_lists_of_integers(tensors, one, other):
    keys = [agree(aten.view.default, tensors[0], sizes) for sizes in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


@settings(max_examples=200, deadline=None)
@given(INTS, INTS, st.booleans())
def test_integers_and_booleans(tensors, start, end, keepdim):
    agree(aten.slice.Tensor, tensors[0], 0, start, end, 1)
    agree(aten.sum.dim_IntList, tensors[0], [start], keepdim, None)


@settings(max_examples=200, deadline=None)
@given(FLOATS, FLOATS)
def test_scalars_are_in_the_key_where_torch_reads_them(tensors, one, other):
    x = tensors[0]
    assert agree(aten.add.Tensor, x, x, one) == agree(aten.add.Tensor, x, x, other)
    norm = aten.linalg_vector_norm.default
    keys = [agree(norm, x, value, None, False, None) for value in (one, other)]
    assert (keys[0] == keys[1]) == (reference._bits(one) == reference._bits(other))


def test_both_parts_of_complex_numbers_are_in_the_key(tensors):
    numbers = (1 + 2j, 1 + 3j, 2 + 1j)
    norm = aten.linalg_vector_norm.default
    keys = {agree(norm, tensors[0], number, None, False, None) for number in numbers}
    assert len(keys) == len(numbers)


def test_scalar_tensors_by_dtype(tensors):
    dtypes = (torch.float32, torch.float64, torch.int64, torch.bool)
    keys = {agree(aten.mul.Tensor, tensors[0], torch.ones((), dtype=dtype)) for dtype in dtypes}
    assert len(keys) == len(dtypes)


def test_the_type_of_a_scalar_is_always_in_the_key(tensors):
    x = tensors[0]
    keys = {agree(aten.add.Tensor, x, x, alpha) for alpha in (1, 1.0, True, 1j)}
    assert len(keys) == 4


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_strings(tensors, one, other):
    keys = [agree(aten.gelu.default, tensors[0], text) for text in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def test_a_call_that_has_no_key_says_why(tensors):
    with pytest.raises(RuntimeError, match=r"aten\.add\.Tensor is left to torch: plain tensor"):
        _core.key_words(aten.add.Tensor, (tensors[0], torch.ones(4, 4), 1))
    with pytest.raises(RuntimeError, match="no DTensor"):
        _core.key_words(aten.add.Tensor, (torch.ones(()), torch.ones(()), 1))
