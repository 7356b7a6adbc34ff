"""Interception of functions of torch in a module's own code, and what is left of it afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from plan_api.ops import function_calls
from plan_api.ops.function_calls import FunctionInterception, InterceptedCalls

SILU = F.silu


@pytest.fixture(autouse=True)
def without_redirects():
    yield
    function_calls.remove_redirects()


class Model(nn.Module):
    """Applies a function, and keeps how many modes of functions there were."""

    def __init__(self, function):
        super().__init__()
        self.function, self.modes = function, 0

    def forward(self, x):
        self.modes = len(_get_current_function_mode_stack())
        return self.function(x)


def plus_one(function):
    return lambda *args, **kwargs: function(*args, **kwargs) + 1


def intercepted(function, *natives):
    """A module in whose code torch's functions return one more than they do."""
    model = Model(function)
    span = FunctionInterception(
        {one: InterceptedCalls(one, {None: plus_one(one)}) for one in natives}
    )
    model.register_forward_pre_hook(span.begin)
    model.register_forward_hook(span.leave, always_call=True)
    return model


def test_calls_are_intercepted_without_a_mode_after_the_first_in_training():
    model, x = intercepted(lambda x: F.silu(x), SILU), torch.zeros(6)
    for modes in (1, 0, 0):
        torch.testing.assert_close(model(x), torch.ones(6))
        assert model.modes == modes
    torch.testing.assert_close(F.silu(x), x)  # outside of the module


OTHERS = {
    "another name": (lambda x, silu=SILU: silu(x), [SILU]),
    "a function of torch": (lambda x: torch.reshape(x, (-1,)), [torch.reshape]),
    "a method": (lambda x: x.view(-1), [torch.Tensor.view]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_methods_and_other_names_are_intercepted_by_the_mode(name):
    model = intercepted(OTHERS[name][0], *OTHERS[name][1])
    for _ in range(3):
        torch.testing.assert_close(model(torch.zeros(6)), torch.ones(6))
        assert model.modes == 1


def test_torchs_names_are_restored():
    intercepted(F.silu, SILU)
    assert F.silu is not SILU
    function_calls.remove_redirects()
    assert F.silu is SILU


def test_a_name_that_others_have_replaced_since_is_left():
    intercepted(F.silu, SILU)
    replaced = F.silu = lambda x: x
    try:
        function_calls.remove_redirects()
        assert F.silu is replaced
    finally:
        F.silu = SILU


@pytest.mark.parametrize("name", ["a function of torch", "a method"])
def test_compiled_code_is_intercepted(name):
    function, natives = OTHERS[name]
    model, x = intercepted(function, *natives), torch.zeros(6)
    for _ in range(2):
        torch.testing.assert_close(
            torch.compile(model, backend="eager", fullgraph=True)(x), torch.ones(6)
        )
    torch.testing.assert_close(torch.compile(function, backend="eager", fullgraph=True)(x), x)
