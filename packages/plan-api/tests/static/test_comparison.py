"""Differences between two runs of a model, and which of them are rounding."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from plan_api.static.comparison import compare_modes
from testkit import fake_mesh
from testkit.models import TwoLinears

R, P = Replicate(), Partial()


def _compared(change, x=None, forward=None, output_placement=None):
    """Compares two equal models, of which a test changes the second."""
    with fake_mesh((1,), ("tp",)) as mesh:
        eager, static = TwoLinears(), TwoLinears()
        local_params = dict(static.named_parameters())
        for module in (eager.up, eager.down):
            for name, param in [*module.named_parameters()]:
                placed = DTensor.from_local(param.detach(), mesh, [R], run_check=False)
                setattr(module, name, nn.Parameter(placed))
        with torch.no_grad():
            change(static)
        if forward is not None:
            static.forward = partial(forward, static)
        if output_placement is not None:
            static.register_forward_hook(
                lambda _, __, result: DTensor.from_local(
                    result, mesh, [output_placement], run_check=False
                )
            )

        def dtensor(tensor):
            return DTensor.from_local(tensor, mesh, [R], run_check=False)

        eager.register_forward_pre_hook(lambda _, args: tuple(map(dtensor, args)))
        eager.register_forward_hook(lambda _, __, result: result.to_local())
        torch.manual_seed(0)
        x = torch.randn(4, 4) if x is None else x
        return compare_modes(
            eager, static, {n: (one, dtensor) for n, one in local_params.items()}, mesh, (x,), {}
        )


def _nothing(_):
    pass


def test_equal_models_do_not_differ():
    assert _compared(_nothing) == []
    assert _compared(_nothing, torch.full((4, 4), torch.nan)) == []


def test_an_output_with_another_placement_differs():
    (found,) = _compared(_nothing, output_placement=P)
    assert (found.site, found.only_rounding) == ("", False)
    assert found.reason == "expected () as in Eager, got (Partial(sum),)"


def test_rounding_is_distinguished_from_another_number():
    def by(factor):
        return lambda model: model.up.weight.mul_(factor)

    rounding = _compared(by(1 + 1e-6))
    assert rounding[0].site == "up"
    assert rounding[0].what == "what is returned by"
    assert all(one.only_rounding for one in rounding)
    wrong = _compared(by(1 + 1e-3))
    assert [one.site for one in wrong[:3]] == ["up", "down", ""]
    assert not any(one.only_rounding for one in wrong[:2])
    assert str(wrong[0]).startswith("what is returned by up: ")


@pytest.mark.parametrize(
    ("change", "forward", "site", "reason"),
    [
        (lambda model: model.up.bias.fill_(torch.nan), None, "up", "nan in one of the modes only"),
        (
            _nothing,
            lambda self, x: self.down(torch.tanh(self.up(x))[:2]).square().mean(),
            "down", r"expected (4, 4) on this rank as in Eager, got (2, 4)",
        ),
        (
            _nothing,
            lambda self, x: (x @ self.up.weight.T @ self.down.weight.T).mean(),
            "up", "static mode did not call it",
        ),
        (
            _nothing,
            lambda self, x: self.down(torch.tanh(self.up(x))).square().mean().double(),
            "", "expected torch.float32 as in Eager, got torch.float64",
        ),
        (
            _nothing,
            lambda self, x: self.down(torch.tanh(self.up(x.detach())).detach()).square().mean(),
            "up", "static mode computed none",
        ),
    ],
    ids=["nan", "shape", "not called", "dtype", "missing gradient"],
)  # fmt: skip
def test_the_first_difference_is_reported(change, forward, site, reason):
    found = _compared(change, forward=forward)
    first = next(one for one in found if not one.only_rounding)
    assert (first.site, first.only_rounding) == (site, False)
    assert reason in first.reason


def test_gradients_between_modules_may_differ_where_those_of_parameters_are_equal():
    """As in rows that grouped products of experts leave uninitialized."""

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        hidden.register_hook(lambda grad: grad * 2**20)
        return self.down(hidden).square().mean()

    def change(model):
        original = model.up.forward

        def with_exact_gradient(x):
            out = original(x)
            out.register_hook(lambda grad: grad / 2**20)
            return out.clone()

        model.up.forward = with_exact_gradient

    assert _compared(change, forward=forward) == []
    wrong = _compared(_nothing, forward=forward)
    assert [one.site for one in wrong] == ["up", "up.weight", "up.bias"]
    assert wrong[0].what == "the gradient of what is returned by"
