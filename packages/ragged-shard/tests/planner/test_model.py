"""A model as groups of named tensors."""

import pytest

from ragged_shard.planner.model import Group, Model, Parameter

MODEL = Model(
    "toy",
    (
        Group("layers.0", (Parameter("w", (3, 4)), Parameter("b", (4,), "other"))),
        Group("root", (Parameter("scalar", ()), Parameter("none", (0, 7)))),
    ),
)


def test_elements_are_counted_in_parameters_groups_and_models():
    assert [group.numel for group in MODEL.groups] == [16, 1]
    assert MODEL.numel == 17


def test_one_group_alone_keeps_the_name_of_the_model():
    assert MODEL.only("root") == Model("toy", MODEL.groups[1:])


def test_an_unknown_group_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"toy has no group 'layers.1'; .* 'layers.0' to 'root'"):
        MODEL.only("layers.1")
