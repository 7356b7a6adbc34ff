"""What of a plan a call can say: redistributions of its DTensors, and specs of its results."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import dtensor_rules
from dtensor_rules import Call, Plan, Rule
from testkit import run_ranks

aten = torch.ops.aten


@pytest.fixture
def call(x):
    return Call(
        aten.cat.default, ([x, torch.ones(4, 4), x.redistribute(placements=[Shard(1)])],), {}
    )


def test_a_move_for_each_dtensor_that_has_other_placements(call):
    moves = call.redistribute({1: [Replicate()], 0: [Shard(0)]})
    assert [(move.argument, move.element) for move in moves] == [(0, 2)]
    assert moves[0].target.placements == (Replicate(),)
    both = call.redistribute({1: [Replicate()], 0: [Replicate()]})
    assert [(move.argument, move.element) for move in both] == [(0, 0), (0, 2)]


def test_what_is_not_said_of_a_result_is_another_tensor_s(call, x):
    like = call.output([Partial()])
    assert (like.placements, like.mesh) == ((Partial(),), x.device_mesh)
    assert like.tensor_meta == x._spec.tensor_meta
    other = call.output([Shard(0)], like=1, shape=(2, 8), dtype=torch.float64).tensor_meta
    assert (other.shape, other.stride, other.dtype) == ((2, 8), (8, 1), torch.float64)
    assert call.output([Shard(0)], stride=(1, 4)).tensor_meta.stride == (1, 4)


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (lambda call: call.redistribute({2: [Shard(0)]}), "redistribute=2: .* call's 2 DTensors"),
        (lambda call: call.redistribute({-1: [Shard(0)]}), "redistribute=-1: .* call's 2 DTensors"),
        (lambda call: call.redistribute({0: []}), r"redistribute\[0\]: \(\) must be one per axis"),
        (lambda call: call.output([Shard(0)], like=2), "like=2: .* the call's 2 DTensors"),
        (lambda call: call.output([Shard(0)] * 2), "must be one per axis"),
    ],
)
def test_what_a_call_does_not_have_is_refused(call, say, message):
    with pytest.raises(ValueError, match=message):
        say(call)


def test_an_error_of_an_action_names_its_rule_and_the_operator(x, same_rules_after):
    dtensor_rules.register_rule(Rule("aten.neg.default", lambda call: call.specs[3], name="mine"))
    with pytest.raises(IndexError) as raised:
        torch.neg(x)
    assert raised.value.__notes__ == ["raised by rule 'mine' for aten.neg.default"]


def define():
    """Defines a norm of rows with a weight, in this process, once."""
    if hasattr(torch.ops.dtensor_rules_call, "row_norm"):
        return

    @torch.library.custom_op("dtensor_rules_call::row_norm", mutates_args=())
    def row_norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * weight

    @torch.library.custom_op("dtensor_rules_call::row_norm_backward", mutates_args=())
    def row_norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        normed, slope = x * scale, grad * weight
        grad_x = scale * (slope - normed * (slope * normed).mean(-1, keepdim=True))
        return grad_x, (grad * normed).flatten(0, -2).sum(0)

    row_norm.register_fake(lambda x, weight: torch.empty_like(x))
    row_norm_backward.register_fake(
        lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight))
    )
    row_norm.register_autograd(
        lambda ctx, grad: row_norm_backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


def rows(call):
    """The rule of the norm and of its backward: rows may be sharded, the last dim may not."""
    x = len(call.specs) - 2
    last = call.specs[x].ndim - 1
    placements = [
        placement if type(placement) is Shard and placement.dim != last else Replicate()
        for placement in call.specs[x].placements
    ]
    targets = dict.fromkeys(range(x + 1), placements) | {x + 1: [Replicate()] * len(placements)}
    outputs = [call.output(placements, like=x)]
    if x == 1:  # the backward: each rank sums over its rows
        partial = [Partial() if one.is_shard() else one for one in placements]
        outputs.append(call.output(partial, like=2))
    return Plan(moves=call.redistribute(targets), outputs=outputs)


@pytest.mark.ranks
def test_a_rule_with_redistributions_trains_as_one_device():
    """The mean's gradient is replicated and expanded, whatever the placement of the result."""

    def check():
        define()
        norm = torch.ops.dtensor_rules_call.row_norm
        mesh = init_device_mesh("cpu", (2,))
        found = []
        with dtensor_rules.enabled():
            for op in ("row_norm", "row_norm_backward"):
                dtensor_rules.register_rule(
                    Rule(f"dtensor_rules_call.{op}.default", rows, name=op, numbers=False)
                )
            for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
                for reduce in (torch.sum, torch.mean, lambda y: y.square().sum()):
                    x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
                    w = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
                    y = norm(x, w)
                    reduce(y).backward()
                    ends = (y, x.grad, w.grad)
                    strides = x.grad._local_tensor.stride(), x.grad._spec.tensor_meta.stride
                    found.append(([end.full_tensor().detach() for end in ends], strides))
            for op in ("row_norm", "row_norm_backward"):
                dtensor_rules.remove_rule(op)
        return found

    define()
    torch.manual_seed(0)
    whole, weight = torch.randn(5, 6, 8), torch.randn(8)
    expected = []
    for reduce in (torch.sum, torch.mean, lambda y: y.square().sum()):
        x, w = whole.clone().requires_grad_(), weight.clone().requires_grad_()
        y = torch.ops.dtensor_rules_call.row_norm(x, w)
        reduce(y).backward()
        expected.append([y.detach(), x.grad, w.grad])
    for found in run_ranks(check, 2):
        for index, (ends, (local, spec)) in enumerate(found):
            for end, wanted in zip(ends, expected[index % 3], strict=True):
                torch.testing.assert_close(end, wanted)
            assert len(local) == len(spec) == 3
            assert 0 not in spec
