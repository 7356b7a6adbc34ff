"""Tensors found in what modules are given and return."""

import collections
import dataclasses
from typing import Any

import pytest
import torch

from plan_api.runtime.containers import map_tensors, replace_part

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Result:
    logits: Any
    loss: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


def negative(x):
    return -x


X, Y = torch.ones(2), torch.zeros(2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (X, -X),
        ((X, 3, None), (-X, 3, None)),
        ({"a": [X, {"b": X}]}, {"a": [-X, {"b": -X}]}),
        (Pair(X, "text"), Pair(-X, "text")),
        (Frozen((X,)), Frozen((-X,))),
        ([Frozen(X)], [Frozen(-X)]),
    ],
    ids=["tensor", "tuple", "nested", "namedtuple", "dataclass", "dataclass in a list"],
)
def test_every_tensor_is_mapped_in_the_same_structure(value, expected):
    moved = map_tensors(value, negative)
    assert type(moved) is type(value)
    assert repr(moved) == repr(expected)


@pytest.mark.parametrize("value", [X, (X, 1), {"a": X}, Result(X), None, "text", 3, ()])
def test_an_unchanged_structure_is_the_same_object(value):
    assert map_tensors(value, lambda x: x) is value


@pytest.mark.parametrize(
    ("value", "index", "expected"),
    [
        (X, 0, -X),
        ((X, Y), 1, (X, -Y)),
        ([X, Y], 0, [-X, Y]),
        (Pair(X, Y), 1, Pair(X, -Y)),
        ((X, (X, Y)), 1, (X, (-X, -Y))),
        ({"a": X, "b": X}, "b", {"a": X, "b": -X}),
        ({"a": X, "b": X}, 0, {"a": -X, "b": X}),
        (Result(X, X), "loss", Result(X, -X)),
        (Result(X, X), 0, Result(-X, X)),
        (Frozen(X), "value", Frozen(-X)),
        (None, 0, None),
    ],
)
def test_one_part_of_a_result_is_replaced(value, index, expected):
    moved = replace_part(value, index, negative, "here")
    assert type(moved) is type(expected)
    assert repr(moved) == repr(expected)


def test_field_and_key_of_a_transformers_output_stay_equal():
    from transformers.modeling_outputs import CausalLMOutput

    output = replace_part(CausalLMOutput(loss=X, logits=Y + 1), "logits", negative, "here")
    assert torch.equal(output.logits, -(Y + 1))
    assert output["logits"] is output.logits
    assert output.to_tuple()[0] is X
    assert torch.equal(replace_part(output, 0, negative, "here").loss, -X)


@pytest.mark.parametrize(
    ("value", "index", "message"),
    [
        (X, 1, "no part 1 in a Tensor"),
        ((X,), 1, "no part 1 in a tuple of 1"),
        ((X,), "a", "no part 'a' in a tuple of 1"),
        ({"a": X}, "b", "no part 'b' in a dict with a"),
        (Result(X), 2, "no part 2 in a Result with logits, loss"),
        (3, 0, "no part 0 in a int"),
    ],
)
def test_a_missing_part_is_an_error(value, index, message):
    with pytest.raises(ValueError, match=f"here: there is {message}"):
        replace_part(value, index, negative, "here")


def test_a_field_that_is_none_stays_none():
    """As the loss of transformers' outputs, of a model that was given no labels."""

    class Output(dict):
        __dataclass_fields__ = Result.__dataclass_fields__
        loss = None

    value = Output(logits=X)
    assert replace_part(value, "loss", negative, "here") is value
    with pytest.raises(ValueError, match="there is no part 'lost' in a Output with logits"):
        replace_part(value, "lost", negative, "here")
