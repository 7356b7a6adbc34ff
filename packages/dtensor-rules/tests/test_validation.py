"""A rule's plan that does not fit its operator is refused before C++ runs it."""

import re

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import dtensor_rules
from dtensor_rules import Call, Move, Plan, Rule
from dtensor_rules.registry.validation import check_plan
from testkit import fake_mesh

aten = torch.ops.aten


@pytest.fixture
def x():
    with fake_mesh((2,)) as mesh:
        yield distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])


def placed(x, *placements):
    return DTensorSpec(x.device_mesh, placements, tensor_meta=x._spec.tensor_meta)


def refused(op, args, kwargs=None, **plan):
    start = f"Rule 'mine': {op}: "
    with pytest.raises(ValueError, match=re.escape(start)) as raised:
        check_plan("mine", Call(op, args, kwargs or {}), Plan(**plan))
    return str(raised.value).removeprefix(start)


def test_as_many_results_as_the_operator_has(x):
    spec = x._spec
    refusal = "1 outputs; the operator has 2 results"
    assert refused(aten.max.dim, (x, 0), outputs=[spec]) == refusal
    assert refused(aten.neg.default, (x,)) == "0 outputs; the operator has 1 results"
    assert "works in place" in refused(aten.neg_.default, (x,), outputs=[spec])
    assert refused(aten.max.dim, (x, 0), finish=bool) == ("finish makes one result, the operator 2")
    assert refused(aten.neg.default, (x,), instead=aten.max.dim, outputs=[spec]) == (
        "instead=aten.max.dim has 2 results, not as many as the call's"
    )
    check_plan("mine", Call(aten.max.dim, (x, 0), {}), Plan(outputs=[spec, None]))
    check_plan("mine", Call(aten.neg_.default, (x,), {}), Plan())
    check_plan("mine", Call(aten.equal.default, (x, x), {}), Plan(finish=bool))
    check_plan("mine", Call(aten.max.dim, (x, 0), {}), Plan(reason="unsupported"))


def test_results_of_the_operator_s_kind(x):
    assert "one spec or None" in refused(aten.neg.default, (x,), outputs=[[x._spec]])
    assert "a list of specs or None" in refused(aten.split.Tensor, (x, 2), outputs=[x._spec])
    assert "expected a DTensorSpec" in refused(aten.neg.default, (x,), outputs=[(Shard(0),)])
    check_plan("mine", Call(aten.split.Tensor, (x, 2), {}), Plan(outputs=[[x._spec, x._spec]]))


def test_placements_that_fit_mesh_and_shape(x):
    two = placed(x, Shard(0), Replicate())
    assert "must be one per axis of (2,)" in refused(aten.neg.default, (x,), outputs=[two])
    third = placed(x, Shard(2))
    assert "names no dim of a tensor of (4, 4)" in refused(aten.neg.default, (x,), outputs=[third])
    bare = DTensorSpec(x.device_mesh, (Shard(0),))
    assert "has no tensor_meta" in refused(aten.neg.default, (x,), outputs=[bare])
    out = {"out": x}
    assert "names no dim" in refused(aten.mm.out, (x, x), out, given={2: third})
    assert refused(aten.mm.out, (x, x), out, given={1: x._spec}) == (
        "given has [1]; the out arguments: [2]"
    )
    check_plan("mine", Call(aten.mm.out, (x, x), out), Plan(given={2: x._spec}))


def test_moves_of_dtensors_in_their_order(x):
    def moves(*places):
        return [Move(argument, element, torch.neg) for argument, element in places]

    def of_add(*places):
        return refused(aten.add.Tensor, (x, x), moves=moves(*places), outputs=[x._spec])

    assert "(argument, element) (2, -1), which is no DTensor" in of_add((2, -1))
    assert "there are [(0, -1), (1, -1)]" in of_add((0, 0))
    assert "in the order of the arguments" in of_add((1, -1), (0, -1))
    assert "once each" in of_add((0, -1), (0, -1))
    plan = Plan(moves=moves((0, 0), (0, 2)), outputs=[x._spec])
    check_plan("mine", Call(aten.cat.default, ([x, torch.ones(1), x],), {}), plan)
    plan = Plan(moves=moves((2, -1)), given={2: x._spec})
    check_plan("mine", Call(aten.mm.out, (x, x), {"out": x}), plan)


def test_values_of_arguments(x):
    assert refused(aten.view.default, (x, [16]), values={2: [8]}, outputs=[x._spec]) == (
        "values has 2; aten.view.default has 2 arguments, counted from 0"
    )
    check_plan(
        "mine", Call(aten.view.default, (x, [16]), {}), Plan(values={1: [8]}, outputs=[x._spec])
    )


def test_a_registered_rule_is_checked(x):
    dtensor_rules.register_rule(Rule("aten.neg.default", lambda call: Plan(), name="empty"))
    try:
        with (
            dtensor_rules.enabled(),
            pytest.raises(ValueError, match=r"Rule 'empty': aten\.neg\.default: 0 outputs"),
        ):
            torch.neg(x)
    finally:
        dtensor_rules.remove_rule("empty")


@pytest.mark.usefixtures("same_rules_after")
@pytest.mark.parametrize(
    ("of", "message"),
    [
        (
            lambda call: call.output([Replicate()]),
            r"has shape \(2, 4\); global shape \(4, 4\) with \(Replicate\(\),\) is \(4, 4\)",
        ),
        (
            lambda call: call.output([Shard(0)], shape=(8, 4)),
            r"shape \(2, 4\); global shape \(8, 4\)",
        ),
        (lambda call: call.output([Shard(0)], shape=(4,)), r"shape \(2, 4\); global shape \(4,\)"),
        (
            lambda call: call.output([Shard(0)], dtype=torch.float64),
            "local tensor is torch.float32, its spec says torch.float64",
        ),
    ],
    ids=["placement", "shape", "dimensions", "dtype"],
)
def test_the_first_local_result_is_compared_with_its_spec(x, of, message):
    rule = Rule("aten.neg.default", lambda call: Plan(outputs=[of(call)]), name="mine")
    dtensor_rules.register_rule(rule)
    with dtensor_rules.enabled():
        for _ in range(2):  # the plan that was refused is not kept
            with pytest.raises(
                ValueError, match=f"Rule 'mine': aten.neg.default: output 0: .*{message}"
            ):
                torch.neg(x)
