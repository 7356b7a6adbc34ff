"""The table of rules: its order, its names, and what its rules do to calls."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import dtensor_rules
from dtensor_rules import Plan, Rule

BUILTIN = ["equal", "partial + replicate", "replicate + partial", "out-given", "out-partial"]


@pytest.fixture(autouse=True)
def same_table_after():
    yield
    for listed in dtensor_rules.rules():
        if listed.rule.name not in BUILTIN:
            dtensor_rules.remove_rule(listed.rule.name)


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
    """Says that the result is replicated, whatever the argument is: wrong, and visible."""
    meta = call.specs[0].tensor_meta
    return Plan(outputs=[DTensorSpec(call.specs[0].mesh, (Replicate(),), tensor_meta=meta)])


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


def test_an_action_that_raises_is_not_hidden(mesh):
    def broken(call):
        raise KeyError("bias")

    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    dtensor_rules.register_rule(named("broken", broken))
    with pytest.raises(KeyError, match="bias"):
        torch.neg(x)
