"""A model as groups of named tensors."""

import pytest

from ragged_shard.planner.models.shapes import ModelShapes, ParameterGroup, ParameterShape

MODEL = ModelShapes(
    "toy",
    (
        ParameterGroup(
            "layers.0", (ParameterShape("w", (3, 4)), ParameterShape("b", (4,), "other"))
        ),
        ParameterGroup("root", (ParameterShape("scalar", ()), ParameterShape("none", (0, 7)))),
    ),
)


def test_elements_are_counted_in_parameters_groups_and_models():
    assert [group.numel for group in MODEL.groups] == [16, 1]
    assert MODEL.numel == 17


def test_one_group_alone_keeps_the_name_of_the_model():
    assert MODEL.only("root") == ModelShapes("toy", MODEL.groups[1:])


def test_an_unknown_group_is_named_with_those_there_are():
    with pytest.raises(
        ValueError,
        match=r"toy: .* from 'layers.0' to 'root', got 'layers.1'",
    ):
        MODEL.only("layers.1")
