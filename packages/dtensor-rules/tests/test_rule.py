"""What a rule may say, and which calls it is for."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_rules import Call, Rule
from dtensor_rules.registry.pattern import fits, kinds_of
from testkit import fake_mesh

aten = torch.ops.aten


def decline(call):
    return None


@pytest.mark.parametrize(
    ("word", "placement", "expected"),
    [
        ("*", Partial(), True),
        ("replicate", Replicate(), True),
        ("replicate", Shard(0), False),
        ("shard", Shard(1), True),
        ("shard(1)", Shard(1), True),
        ("shard(0)", Shard(1), False),
        ("shard", _StridedShard(1, split_factor=2), False),
        ("partial", Partial("max"), True),
        ("partial(sum)", Partial(), True),
        ("partial(sum)", Partial("max"), False),
        ("_StridedShard", _StridedShard(1, split_factor=2), True),
        ("_StridedShard", Shard(1), False),
    ],
    ids=str,
)
def test_a_word_fits_the_placements_it_names(word, placement, expected):
    assert fits(word, placement) is expected


@pytest.mark.parametrize(
    ("op", "kinds"),
    [
        (aten.add.Tensor, {"functional"}),
        (aten.add_.Tensor, {"in-place", "out-given"}),
        (aten._foreach_add_.List, {"in-place", "out-given"}),
        (aten.mm.out, {"out-given"}),
        (aten.view.default, {"view"}),
        (aten.mm.default, {"functional"}),
    ],
    # Sorted: processes that share the tests out must agree on their names.
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_an_operator_is_of_the_kinds_its_schema_shows(op, kinds):
    assert kinds_of(op) == kinds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"op": "aten.addd.Tensor"}, "op='aten.addd.Tensor' is no operator"),
        ({"op": "aten.add.Tenso"}, r"aten\.add has .*Tensor"),
        ({"op": "aten::add"}, r"write aten\.add\.default"),
        ({"op": "add"}, "is no operator such as 'aten.add.Tensor'"),
        ({"kind": "outplace"}, "kind='outplace' is none of"),
        ({"placements": ()}, r"placements=\(\) must be"),
        ({"placements": "partial"}, "placements='partial' must be"),
        ({"placements": ("partial", "replicated")}, "'replicated' is none of"),
        ({"placements": ("shard(x)",)}, r"'shard\(x\)' is none of"),
        ({"placements": (Replicate(),)}, "is none of"),
    ],
    ids=str,
)
def test_a_rule_that_can_match_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Rule(**({"op": "aten.add.Tensor", "action": decline} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action": 3}, "action=3 must be a function"),
        ({"action": lambda: None}, "action=.* must be callable with one Call"),
        ({"action": lambda a, b: None}, "action=.* must be callable with one Call"),
        ({"meta": "bias"}, "meta='bias' must be a function"),
        ({"meta": lambda: True}, "meta=.* must be callable with one Call"),
    ],
    ids=["number", "no argument", "two arguments", "meta word", "meta without argument"],
)
def test_an_action_of_the_wrong_arity_is_refused(fields, message):
    with pytest.raises(TypeError, match=message):
        Rule(**({"op": "aten.add.Tensor", "action": decline} | fields))


def test_a_compiled_action_need_not_say_what_it_takes():
    assert Rule("*", max).action is max  # of which inspect.signature knows nothing


def test_its_name_is_that_of_its_action_unless_it_has_one():
    assert Rule("*", decline).name == "decline"
    assert Rule("*", decline, name="mine").name == "mine"


def test_the_four_fields_have_to_fit():
    with fake_mesh((2, 2)) as mesh:
        partial = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Partial()])
        whole = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
        call = Call(aten.add.Tensor, (partial, whole), {})
        flipped = Call(aten.add.Tensor, (whole, partial), {})

        def fit(**fields):
            return Rule(**({"op": "aten.add.Tensor", "action": decline} | fields)).matches(call)

        assert fit()
        assert fit(op="aten.add*")
        assert fit(op="*")
        assert not fit(op="aten.sub.Tensor")
        assert fit(kind="functional")
        assert not fit(kind="in-place")
        assert fit(placements=("partial", "replicate"))  # on the second axis
        assert fit(placements=("shard(0)", "shard(0)"))  # on the first
        assert not fit(placements=("shard(0)", "replicate"))  # on no one axis
        assert not fit(placements=("partial",))
        assert not fit(placements=("partial", "replicate", "*"))
        assert fit(meta=lambda c: c.specs[0].shape == (4, 4))
        assert not fit(meta=lambda c: False)
        rule = Rule("aten.add.Tensor", decline, placements=("partial", "replicate"))
        assert not rule.matches(flipped)


def test_a_list_of_tensors_counts_as_its_items():
    with fake_mesh((2,)) as mesh:
        tensors = [distribute_tensor(torch.ones(4), mesh, [p]) for p in (Shard(0), Replicate())]
        call = Call(aten.cat.default, (tensors,), {})
        assert Rule("*", decline, placements=("shard", "replicate")).matches(call)
