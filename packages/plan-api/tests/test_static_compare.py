"""What differs between two runs of a model, and what is called rounding."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from plan_api.static.compare import compare
from testkit import fake_mesh
from testkit.models import TwoLinears

R, P = Replicate(), Partial()


def _compared(change, x=None, forward=None, shown=None):
    """What `compare` says of two models that are alike but for what a test does to the second."""
    with fake_mesh((1,), ("tp",)) as mesh:
        eager, static = TwoLinears(), TwoLinears()
        leaves = dict(static.named_parameters())
        for module in (eager.up, eager.down):
            for name, param in [*module.named_parameters()]:
                placed = DTensor.from_local(param.detach(), mesh, [R], run_check=False)
                setattr(module, name, nn.Parameter(placed))
        with torch.no_grad():
            change(static)
        if forward is not None:
            static.forward = partial(forward, static)
        if shown is not None:
            static.register_forward_hook(
                lambda _, __, result: DTensor.from_local(result, mesh, [shown], run_check=False)
            )

        def dtensor(tensor):
            return DTensor.from_local(tensor, mesh, [R], run_check=False)

        eager.register_forward_pre_hook(lambda _, args: tuple(map(dtensor, args)))
        eager.register_forward_hook(lambda _, __, result: result.to_local())
        torch.manual_seed(0)
        x = torch.randn(4, 4) if x is None else x
        return compare(eager, static, {n: (leaf, dtensor) for n, leaf in leaves.items()}, (x,), {})


def _nothing(_):
    pass


def test_models_that_are_alike_do_not_differ():
    assert _compared(_nothing) == []
    assert _compared(_nothing, torch.full((4, 4), torch.nan)) == []


def test_a_result_that_is_shown_as_another_placement_differs():
    (found,) = _compared(_nothing, shown=P)
    assert (found.site, found.bits) == ("", False)
    assert found.reason == "() in Eager, (Partial(sum),)"


def test_rounding_is_told_apart_from_another_number():
    def by(factor):
        return lambda model: model.up.weight.mul_(factor)

    rounding = _compared(by(1 + 1e-6))
    assert rounding[0].site == "up"
    assert rounding[0].what == "what is returned by"
    assert all(one.bits for one in rounding)
    wrong = _compared(by(1 + 1e-3))
    assert [one.site for one in wrong[:3]] == ["up", "down", ""]
    assert not any(one.bits for one in wrong[:2])
    assert str(wrong[0]).startswith("what is returned by up: ")


@pytest.mark.parametrize(
    ("change", "forward", "site", "reason"),
    [
        (lambda model: model.up.bias.fill_(torch.nan), None, "up", "nan in one of the modes only"),
        (
            _nothing,
            lambda self, x: self.down(torch.tanh(self.up(x))[:2]).square().mean(),
            "down", r"(4, 4) on this rank in Eager, (2, 4)",
        ),
        (
            _nothing,
            lambda self, x: (x @ self.up.weight.T @ self.down.weight.T).mean(),
            "up", "static mode did not call it",
        ),
        (
            _nothing,
            lambda self, x: self.down(torch.tanh(self.up(x))).square().mean().double(),
            "", "torch.float32 in Eager, torch.float64",
        ),
        (
            _nothing,
            lambda self, x: self.down(torch.tanh(self.up(x.detach())).detach()).square().mean(),
            "up", "none came in static mode",
        ),
    ],
    ids=["nan", "shape", "not called", "dtype", "a gradient that does not come"],
)  # fmt: skip
def test_what_differs_first_is_named(change, forward, site, reason):
    found = _compared(change, forward=forward)
    first = next(one for one in found if not one.bits)
    assert (first.site, first.bits) == (site, False)
    assert reason in first.reason
