"""Which calls come to a rule: operators that torch cannot shard, and numbers that it does not read.

A rule that is never asked, or whose answer is handed to a call that it was not made for, is silent:
each test here is about one of the two.
"""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtensor_rules
from dtensor_rules import Plan, Rule, _core
from dtensor_rules.inspect import reference
from testkit import fake_mesh

RENORM = "aten.renorm.default"
pytestmark = pytest.mark.usefixtures("same_rules_after")


def as_given(call):
    """The result is placed as the first argument, whose shape it has."""
    return Plan(outputs=[call.specs[0]])


def renormalized(x):
    return torch.renorm(x, 2, 0, 1.0)


def test_an_operator_without_a_strategy_goes_by_its_rule(mesh, x):
    with pytest.raises(NotImplementedError, match=RENORM):
        renormalized(x)
    dtensor_rules.register_rule(Rule(RENORM, as_given, placements=("shard(0)",)))
    for _ in range(2):
        result = renormalized(x)
        assert result.placements == (Shard(0),)
        assert torch.equal(result.to_local(), renormalized(x.to_local()))
    stats = dtensor_rules.stats()[RENORM]
    assert (stats.miss, stats.rule) == (1, 1)
    with pytest.raises(NotImplementedError, match=RENORM):  # which no rule is for
        renormalized(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    dtensor_rules.remove_rule("as_given")
    with pytest.raises(NotImplementedError, match=RENORM):
        renormalized(x)


def test_also_when_the_rule_was_there_before_the_library_was_enabled():
    dtensor_rules.register_rule(Rule(RENORM, as_given))
    with fake_mesh((2,)) as mesh:
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        with dtensor_rules.enabled():
            assert renormalized(x).placements == (Shard(0),)
        with pytest.raises(NotImplementedError, match=RENORM):
            renormalized(x)


def by_alpha(call):
    """Gathers both tensors for alpha 2, which torch does not; else leaves them as they are."""
    at = [Replicate()] if call.kwargs.get("alpha") == 2 else call.specs[0].placements
    return Plan(moves=call.redistribute({0: at, 1: at}), outputs=[call.output(at)])


def placements_by_alpha(x):
    return [torch.add(x, x, alpha=alpha).placements[0] for alpha in (1, 2, 1, 2, 3)]


def test_a_rule_may_read_numbers(x):
    dtensor_rules.register_rule(Rule("aten.a?d.Tensor", by_alpha))
    expected = [Shard(0), Replicate(), Shard(0), Replicate(), Shard(0)]
    assert placements_by_alpha(x) == expected
    dtensor_rules.remove_rule("by_alpha")
    assert placements_by_alpha(x) == [Shard(0)] * 5
    assert dtensor_rules.stats()["aten.add.Tensor"].miss == 4  # three alphas, then one plan for all


def test_a_rule_that_reads_none_has_one_plan_for_all(x):
    dtensor_rules.register_rule(Rule("*", by_alpha, numbers=False))
    assert placements_by_alpha(x) == [Shard(0)] * 5
    assert dtensor_rules.stats()["aten.add.Tensor"].miss == 1


@pytest.mark.parametrize("numbers", [True, False])
def test_keys_agree_with_the_reference(x, numbers):
    dtensor_rules.register_rule(Rule("aten.add.*", by_alpha, numbers=numbers))
    add = torch.ops.aten.add.Tensor
    keys = [_core.key_words(add, (x, x, alpha)) for alpha in (1, 2)]
    assert (keys[0] != keys[1]) is numbers
    assert keys == [reference.key_words(add, keys[0][0], (x, x, alpha)) for alpha in (1, 2)]


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("aten.matmul.default", "torch makes it of other operators"),
        ("aten.rand_like.default", "it is random"),
        ("aten.as_strided.default", "torch has a handler for it"),
    ],
)
def test_a_rule_that_is_never_asked_is_said_to_be(op, why):
    with pytest.warns(UserWarning, match=rf"Rule 'as_given' will not be asked about {op}: {why}"):
        dtensor_rules.register_rule(Rule(op, as_given))


@pytest.mark.parametrize(
    ("op", "kind", "why"),
    [
        ("aten.neg.default", "in-place", "kind='in-place', and the operator is functional"),
        ("aten.neg_.default", "view", "kind='view', and the operator is in-place and out-given"),
    ],
)
def test_a_rule_for_another_kind_than_its_operator_s_is_said_to_be_never_asked(op, kind, why):
    with pytest.warns(UserWarning, match=rf"Rule 'as_given' will not be asked about {op}: .*{why}"):
        dtensor_rules.register_rule(Rule(op, as_given, kind=kind))
