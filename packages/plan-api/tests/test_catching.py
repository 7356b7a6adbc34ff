"""Functions of torch that are caught while a module's code runs, however it has come by them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import dropout as imported
from torch.overrides import _get_current_function_mode_stack

from plan_api.static.catching import Calls, Span


class Named(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.0)


class Imported(nn.Module):
    def forward(self, x):
        return imported(x, 0.0)


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = Named()

    def forward(self, x):
        return F.dropout(self.child(F.dropout(x, 0.0)), 0.0)


class Method(nn.Module):
    def forward(self, x):
        return x.reshape(1), torch.reshape(x, (1,))


class Raises(nn.Module):
    def forward(self, x):
        raise RuntimeError("on purpose")


def catching(module, add, function=F.dropout, name="dropout"):
    """A module in which a function adds a number, and nothing else."""
    span = Span({function: Calls(function, name, {None: lambda x, *_, **__: x + add})})
    module.register_forward_pre_hook(span.begin)
    module.register_forward_hook(span.end, prepend=True, always_call=True)
    return module


def calls(module, times=3):
    return [module(torch.zeros(())).item() for _ in range(times)]


@pytest.mark.parametrize("kind", [Named, Imported])
def test_it_is_caught_in_every_run(kind):
    module = catching(kind(), 1)
    assert calls(module) == [1, 1, 1]
    assert calls(module.eval()) == [1, 1, 1]


def test_no_mode_is_needed_for_what_is_found_by_name(monkeypatch):
    module = catching(Named(), 1)
    calls(module, 1)
    depths = []
    monkeypatch.setattr(
        Named, "forward", lambda _, x: depths.append(len(_get_current_function_mode_stack())) or x
    )
    calls(module, 1)
    calls(module.eval(), 1)  # the first run in which it does not train
    assert depths == [0, 1]


def test_a_child_of_its_own_span_leaves_its_parent_s_to_it():
    parent = catching(Parent(), 10)
    catching(parent.child, 1)
    assert calls(parent) == [21, 21, 21]


def test_methods_are_caught_by_a_mode():
    module = catching(Method(), 1, torch.Tensor.reshape, "reshape")
    for _ in range(2):
        method, function = module(torch.zeros(()))
        assert (method.item(), function.item()) == (1, 0)


def test_nothing_is_left_behind():
    before = F.dropout
    calls(catching(Named(), 1))
    module = catching(Raises(), 1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="on purpose"):
            module(torch.zeros(()))
    assert F.dropout is before
    assert not _get_current_function_mode_stack()
