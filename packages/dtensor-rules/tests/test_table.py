"""The table of rules: its order, its names, and what its rules do to calls."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import dtensor_rules
from dtensor_rules import Move, Plan, Rule
from testkit import fake_mesh

aten = torch.ops.aten
BUILTIN = ["equal", "partial + replicate", "replicate + partial", "out-given", "out-partial"]
pytestmark = pytest.mark.usefixtures("same_rules_after")


def names():
    return [listed.rule.name for listed in dtensor_rules.rules()]


def named(name, action=lambda call: None, op="aten.neg.default"):
    return Rule(op, action, name=name)


def test_the_built_in_rules_are_there_in_their_order():
    assert names() == BUILTIN


def test_a_rule_goes_to_the_end_or_beside_another():
    dtensor_rules.register_rule(named("last"))
    dtensor_rules.register_rule(named("first"), before="equal")
    dtensor_rules.register_rule(named("second"), after="first")
    assert names() == ["first", "second", *BUILTIN, "last"]


def test_what_cannot_be_placed_is_refused_and_leaves_the_table():
    with pytest.raises(ValueError, match="no rule is named 'nobody'; there are equal, "):
        dtensor_rules.register_rule(named("x"), before="nobody")
    with pytest.raises(ValueError, match="give one of them"):
        dtensor_rules.register_rule(named("x"), before="equal", after="equal")
    with pytest.raises(ValueError, match="a rule named 'equal' is there already"):
        dtensor_rules.register_rule(named("equal"))
    with pytest.raises(ValueError, match="no rule is named 'x'"):
        dtensor_rules.remove_rule("x")
    assert names() == BUILTIN


def replicated(call):
    """Gathers the argument, which torch does not: visible in the result."""
    whole = [Replicate()]
    return Plan(moves=call.redistribute({0: whole}), outputs=[call.output(whole)])


def test_the_first_rule_that_answers_wins_and_its_hits_are_counted(mesh):
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert torch.neg(x).placements == (Shard(0),)
    dtensor_rules.register_rule(named("declines"))
    dtensor_rules.register_rule(named("answers", replicated))
    for _ in range(3):
        assert torch.neg(x).placements == (Replicate(),)
    hits = {listed.rule.name: listed.hits for listed in dtensor_rules.rules()}
    assert hits["answers"] == 3
    assert hits["declines"] == 0
    stats = dtensor_rules.stats()["aten.neg.default"]
    assert (stats.rule, stats.cache, stats.miss) == (2, 0, 2)
    dtensor_rules.remove_rule("answers")
    assert torch.neg(x).placements == (Shard(0),)


def test_an_action_that_returns_no_plan_is_named(mesh):
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    dtensor_rules.register_rule(named("confused", lambda call: (Shard(0),)))
    with pytest.raises(TypeError, match=r"Rule 'confused': its action returned \(Shard"):
        torch.neg(x)


@pytest.mark.parametrize(
    ("function", "op", "argument"),
    [
        (torch.add, "aten.add.Tensor", "other"),
        (torch.mm, "aten.mm.default", "mat2"),
        (lambda x, y: torch.cat([x, y]), "aten.cat.default", "tensors"),
        (torch.Tensor.add_, "aten.add_.Tensor", "other"),
    ],
)
def test_arguments_on_several_meshes_are_named_and_no_rule_is_asked(function, op, argument):
    def asked(call):
        raise AssertionError("rules are about one mesh")

    with fake_mesh((4,)) as mesh, dtensor_rules.enabled():
        other = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        y = distribute_tensor(torch.ones(4, 4), other, [Shard(0), Replicate()])
        dtensor_rules.register_rule(Rule(op, asked), before="equal")
        with pytest.raises(RuntimeError, match=rf"{op}: argument '{argument}' is on .*\(2, 2\)"):
            function(x, y)


def test_lists_may_be_on_several_meshes_pair_by_pair():
    """As the parameters of one optimizer are."""
    with fake_mesh((4,)) as mesh, dtensor_rules.enabled():
        other = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
        y = distribute_tensor(torch.ones(4, 4), other, [Shard(0), Replicate()], src_data_rank=None)
        for _ in range(2):
            torch._foreach_add_([x, y], [x, y])
        assert x.to_local().unique().tolist() == y.to_local().unique().tolist() == [4.0]
        assert dtensor_rules.stats()["aten._foreach_add_.List"].miss == 1


def test_an_action_that_raises_is_not_hidden(mesh):
    def broken(call):
        raise KeyError("bias")

    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    dtensor_rules.register_rule(named("broken", broken))
    with pytest.raises(KeyError, match="bias"):
        torch.neg(x)


@pytest.mark.parametrize(
    ("op", "function"),
    [("aten.add.Tensor", torch.add), ("aten.maximum.default", torch.maximum)],
    ids=["typed", "boxed"],
)
def test_a_local_tensor_that_is_replaced_meanwhile_is_still_the_operator_s(mesh, op, function):
    """Others run while an argument is redistributed; torch holds all of them from the beginning."""
    x, y = (distribute_tensor(torch.full((4,), by), mesh, [Shard(0)]) for by in (1.0, 2.0))
    others = []

    def replaces(local):
        y._local_tensor = torch.full((2,), 3.0)
        others.extend(torch.full((2,), 4.0) for _ in range(8))  # where the old one lay
        return local

    def moved(call):
        return Plan(moves=[Move(0, -1, replaces, call.specs[0])], outputs=[call.specs[0]])

    dtensor_rules.register_rule(named("moves", moved, op))
    for _ in range(3):
        y._local_tensor = torch.full((2,), 2.0)
        wanted = function(x._local_tensor, y._local_tensor)
        assert torch.equal(function(x, y)._local_tensor, wanted)


def test_a_spec_that_is_changed_is_not_handed_out_for_those_that_were_equal(mesh):
    x, y = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) for _ in range(2))
    dtensor_rules.register_rule(named("as given", lambda call: Plan(outputs=[call.specs[0]])))
    for one in (x, y):
        torch.neg(one)
    x._spec.placements = (Shard(1),)
    assert torch.neg(y).placements == (Shard(0),)


def replica(mesh):
    return lambda local: DTensorSpec(
        mesh, (Replicate(),), tensor_meta=TensorMeta(local.shape, local.stride(), local.dtype)
    )


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("op", "args", "values", "wanted"),
    [
        (aten.mul.Scalar, (2.0,), {1: 3.0}, lambda x: x * 3.0),
        (aten.permute.default, ([0, 1],), {1: [1, 0]}, lambda x: x.t()),
        (aten.view.default, ([4, 2],), {1: [2, 4]}, lambda x: x.view(2, 4)),
        (aten.sum.dim_IntList, ([0], True), {1: [1], 2: False}, lambda x: x.sum(1)),
        (aten.sum.dim_IntList, ([0], True), {2: False, 1: [1]}, lambda x: x.sum(1)),
        (aten.sum.dim_IntList, ([0], True), {1: None}, lambda x: x.sum(None, keepdim=True)),
        (aten.roll.default, ([1], [0]), {1: [1], 2: [1]}, lambda x: x.roll(1, 1)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else getattr(value, "__name__", ""),
)
def test_an_operator_gets_the_values_of_its_plan(mesh, op, args, values, wanted, grad):
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Replicate()])
    made = Plan(values=values, outputs=[replica(mesh)])
    dtensor_rules.register_rule(named("values", lambda call: made, str(op)))
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            result = op(x, *args)
            assert torch.equal(result._local_tensor, wanted(x._local_tensor))
            assert result.shape == result._local_tensor.shape


@pytest.mark.parametrize(
    ("op", "function"),
    [("aten.neg.default", torch.neg), ("aten.abs.default", torch.abs)],
    ids=["typed", "boxed"],
)
def test_another_operator_may_be_called_with_values_of_its_own(mesh, op, function):
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])

    def instead(call):
        return Plan(instead=aten.add.Scalar, values={1: 5, 2: 3}, outputs=[call.specs[0]])

    dtensor_rules.register_rule(named("instead", instead, op))
    for _ in range(2):
        assert torch.equal(function(x)._local_tensor, x._local_tensor + 15)


def test_a_result_that_is_no_dtensor_stays_as_it_is(mesh):
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    for op, function in (("neg", torch.neg), ("abs", torch.abs)):
        rule = named(op, lambda call: Plan(outputs=[None]), f"aten.{op}.default")
        dtensor_rules.register_rule(rule)
        for _ in range(2):
            assert type(function(x)) is torch.Tensor
