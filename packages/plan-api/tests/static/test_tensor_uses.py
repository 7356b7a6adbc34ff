"""Where one redistribution serves several users of a tensor."""

import pytest

from plan_api.lowering.ir import HookPoint
from plan_api.static.generation.tensor_uses import Place, SharedTensor, Use


def taken_by(path):
    return Place(path, HookPoint.FORWARD_PRE, 0)


NORM = Place("norm", HookPoint.FORWARD, 0)
BLOCK, ATTENTION, MLP = taken_by("block"), taken_by("block.attention"), taken_by("block.mlp")
Q, K, UP = (taken_by(path) for path in ("block.attention.q", "block.attention.k", "block.mlp.up"))


def places_for(users, *uses):
    """Uses are inputs, or the path of a module in which a function takes the tensor."""
    shared = SharedTensor(
        [NORM, BLOCK, ATTENTION, MLP],
        [
            Use(None, use) if isinstance(use, str) else Use(use, use.path.rpartition(".")[0])
            for use in uses
        ],
    )
    return shared.places_for(users)


def test_the_innermost_module_around_all_users_is_chosen():
    assert places_for({Q, K}, Q, K) == {ATTENTION: {Q, K}}


def test_a_module_around_two_modules_is_chosen():
    assert places_for({Q, K, UP}, Q, K, UP) == {BLOCK: {Q, K, UP}}


@pytest.mark.parametrize("other", ["block", taken_by("block.router")], ids=str)
def test_users_are_served_apart_where_something_else_takes_the_tensor(other):
    assert places_for({Q, K, UP}, Q, K, UP, other) == {ATTENTION: {Q, K}, MLP: {UP}}


def test_nothing_is_shared_with_a_function_beside_the_users():
    assert places_for({Q, K}, Q, K, "block.attention") == {}


def test_the_output_is_chosen_where_no_module_is_around_all_users():
    head = taken_by("head")
    assert places_for({Q, head}, Q, head) == {NORM: {Q, head}}
    assert places_for({Q, head}, Q, head, "") == {ATTENTION: {Q}}
