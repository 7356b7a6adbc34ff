"""Entries of context parallelism: their text, and the arguments that they refuse."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from plan_api import Plan, UlyssesRing, generate_static, lower, parallelize, uninstall, zoo
from plan_api.context_parallel.attention import IMPLEMENTATIONS
from plan_api.context_parallel.kernels import select_kernel
from plan_api.context_parallel.local_sequence import sequence_transform, without_sharded_positions
from plan_api.lowering.ir import OpKind
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, fake_mesh, models

needs_flattening = pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)

TOKENS = torch.zeros(2, 8, dtype=torch.long)
PADDED = torch.arange(16).view(2, 8).ge(9)


@pytest.fixture
def cp():
    with fake_mesh((2, 2), ("cp", "tp")) as mesh:
        yield mesh


def llama(**changes):
    return models.llama(attn_implementation="sdpa", **changes)


def test_entries_are_printed_saved_and_lowered(cp):
    plan = zoo.llama(cp, cp="cp", cp_method="all-gather")
    entries = [str(one) for one in plan.entries if one.kind.value in ("sequence", "context")]
    cut, two = str(Shard(1)), str(Shard(2))
    assert entries == [
        f"sequence('<in:input_ids>', cp={cut}, order='zigzag')",
        f"sequence('<in:labels>', cp={cut}, order='zigzag', shift='shift_labels')",
        rf"sequence('model\\.rotary_emb.<in:position_ids>', cp={cut}, order='zigzag', "
        "positions=True)",
        rf"context('model\\.layers\\.\\d+\\.self_attn', cp={two}, method='all-gather', "
        "order='zigzag', heads='config.num_key_value_heads')",
    ]
    assert Plan.from_json(plan.to_json(), cp).entries == plan.entries
    assert all(one.line.startswith("test_plan.py") for one in plan.entries)
    ops = [str(op) for op in lower(plan, llama()).ops]
    assert "forward_pre:<in>:0:order(->S(1), cp, order='zigzag')" in ops
    assert "forward_pre:<in>:shift_labels:redist(->S(1), cp)" in ops
    attention = [op for op in ops if "<attention>" in op]
    assert attention[1].startswith("model.layers.1.self_attn.forward_pre:<attention>:0:context(")
    assert "method='all-gather', order='zigzag'" in attention[1]
    shown = [line for line in str(plan.explain(llama())).splitlines() if "<attention>" in line]
    assert all("cp=S(2), method=all-gather, order=zigzag" in line for line in shown)


def test_a_later_entry_overrides_an_earlier_one(cp):
    plan = zoo.llama(cp, cp="cp").context(r"model\.layers\.1\.self_attn", "cp", method="all-gather")
    lowered = lower(plan, llama())
    (override,) = lowered.overrides
    assert "method='ring'" in str(override.earlier)
    assert "method='all-gather'" in str(override.later)


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (lambda plan: plan.context("a", "cp", method="rong"), "method='rong' must be one of"),
        (lambda plan: plan.context("a", "cp", order="zig"), "order='zig' must be one of 'zigzag'"),
        (
            lambda plan: plan.context("a", "cp", method="ulysses", order="zigzag"),
            "method='ulysses'.*order='contiguous'",
        ),
        (lambda plan: plan.context("a", "cp", method=UlyssesRing(1)), "at least 2, got 1"),
        (lambda plan: plan.context("a", ("cp", "tp")), r"1 placements for 2 axes \('cp', 'tp'\)"),
        (lambda plan: plan.context("a.<in>", "cp"), "has to name modules"),
        (lambda plan: plan.sequence("a.weight", "cp"), r"'a.weight'\): expected an input"),
        (lambda plan: plan.sequence("<in>", "cp", dim=-1), "count dims from the front"),
        (lambda plan: plan.sequence("<out>", "cp", shift="x"), "shift= expected labels"),
        (lambda plan: plan.sequence("<in>", "cp", order="zig"), "order='zig' must be one of"),
        (lambda plan: plan.sequence("<out>", "cp", positions=True), "positions= expected an input"),
    ],
    ids=["method", "order", "ulysses in zigzag", "a group of one", "two axes",
         "a tensor", "a parameter", "a dim",
         "shift of an output", "order of a sequence", "positions of an output"],
)  # fmt: skip
def test_invalid_arguments_are_refused(cp, say, message):
    with pytest.raises(ValueError, match=message):
        say(Plan(cp))


def test_one_axis_has_one_order(cp):
    plan = zoo.llama(cp, cp="cp").sequence("<out:logits>", "cp", order="contiguous")
    with pytest.raises(
        ValueError, match=r"two orders along 'cp'.*zigzag.*'<out:logits>'.*one order"
    ):
        lower(plan, llama())


@pytest.mark.parametrize(("tp", "heads"), [("tp", 2), (None, 3)], ids=["beside tp", "alone"])
def test_ulysses_names_module_heads_and_axis(cp, tp, heads):
    three = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
    plan = zoo.llama(cp, tp=tp, cp="cp", cp_method="ulysses")
    along = r"'cp' of size 2" + (r" and 'tp' of size 2" if tp else "")
    message = (
        rf"layers\.0\.self_attn has {heads} key-value heads, which axis {along} does not divide"
    )
    with pytest.raises(ValueError, match=message):
        lower(plan, llama(**({} if tp else three)))
    lower(zoo.llama(cp, tp=tp, cp="cp"), llama())


def test_groups_that_shard_heads_are_saved_and_checked():
    """They divide the axis, and with tensor parallelism the heads."""
    with fake_mesh((4, 2), ("cp", "tp")) as mesh:
        plan = zoo.llama(mesh, tp=None, cp="cp", cp_method=UlyssesRing(2))
        (entry,) = (one for one in plan.entries if one.kind.value == "context")
        assert "method='ulysses-ring', order='zigzag', ulysses_degree=2" in str(entry)
        assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries
        lower(plan, llama())
        with pytest.raises(ValueError, match=r"'cp' of size 2 and 'tp' of size 2 does not divide"):
            lower(zoo.llama(mesh, cp="cp", cp_method=UlyssesRing(2)), llama())
        message = r"degree that divides the 4 ranks of axis 'cp', got 3; give UlyssesRing a divisor"
        with pytest.raises(ValueError, match=message):
            lower(zoo.llama(mesh, tp=None, cp="cp", cp_method=UlyssesRing(3)), llama())


def test_an_attribute_without_a_number_of_heads_is_refused(cp):
    plan = Plan(cp).context(r"model\.layers\.0\.self_attn", "cp", heads="config.heads")
    with pytest.raises(ValueError, match=r"LlamaAttention has no integer 'config.heads'"):
        lower(plan, llama())


def test_axes_of_the_zoo(cp):
    with pytest.raises(ValueError, match=r"zoo.llama: cp='tp' is tp as well"):
        zoo.llama(cp, cp="tp")


def test_tokens_are_sharded_along_cp_before_tp():
    with fake_mesh((2, 2), ("tp", "cp")) as mesh:
        with pytest.raises(ValueError, match=r"make it with 'cp' before 'tp'"):
            zoo.llama(mesh, cp="cp", sp=True)
        zoo.llama(mesh, cp="cp")


def test_static_mode_takes_sequences_that_enter_the_model_and_positions(cp):
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    with pytest.raises(ValueError, match=r"<attention>:0: expected fake=False with context paral"):
        generate_static(zoo.llama(cp, cp="cp"), llama(), batch, fake=True)
    for plan, site in (
        (zoo.llama(cp, cp="cp").sequence("<out:logits>", "cp"), r"forward:<out>:logits"),
        (zoo.llama(cp, cp="cp").sequence(r"model\.norm.<in>", "cp"), r"model.norm.*<in>:0"),
    ):
        message = rf"{site}: expected a sequence that enters the model, or positions"
        with pytest.raises(ValueError, match=message):
            parallelize(llama(), plan, mode="static")


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("rank", [0, 1])
def test_positions_of_a_rank_are_those_in_the_whole_sequence(order, rank):
    """In static mode the model counts the tokens of its rank."""
    with fake_mesh((2,), ("cp",), rank=rank) as mesh:
        plan = Plan(mesh).sequence("<in>", "cp", order=order, positions=True)
        plan.context("", "cp", order=order)
        (site,) = (
            site for site in lower(plan, torch.nn.Identity()).sites if "<in>" in str(site.steps)
        )
        (step,) = (step for step in site.steps if step.kind is OpKind.ORDER)
        own = sequence_transform(site, step, mesh)(torch.arange(4)[None] + 10)
        expected = {"contiguous": [0, 1, 2, 3, 4, 5, 6, 7], "zigzag": [0, 1, 6, 7, 2, 3, 4, 5]}
        assert own.tolist() == [[10 + one for one in expected[order][4 * rank : 4 * rank + 4]]]
        (moved,) = (step for step in site.steps if step.kind is OpKind.REDIST)
        assert not without_sharded_positions(site, moved).moves


class _Norm(nn.Module):
    def forward(self, x):
        return F.normalize(x, dim=-1)


class _NormedAttention(nn.Module):
    """Attention of normalized queries and keys, as Qwen3's."""

    def __init__(self):
        super().__init__()
        self.norm = _Norm()

    def forward(self, x):
        one = self.norm(x)
        return F.scaled_dot_product_attention(one, one, x, is_causal=True)


def test_attention_behind_a_child_is_that_of_a_sharded_sequence(monkeypatch):
    """In static mode, where the plan annotates dropout there too, which attention may have."""
    calls = []

    def attention(query, key, value, call, sinks):
        calls.append(query.shape)
        return value

    monkeypatch.setitem(IMPLEMENTATIONS, "ring", attention)
    with fake_mesh((1, 1), ("cp", "tp")) as mesh:
        plan = Plan(mesh).shard("<in:0>", Shard(2), "cp")
        plan.context("[01]", "cp").annotate("[01].<op:dropout>", Shard(1), "tp")
        model = nn.Sequential(_NormedAttention(), _NormedAttention())
        model = parallelize(model, plan, mode="static", guard_steps=0, use=())
        for _ in range(3):  # by a mode of functions at first, then by their names
            model(torch.ones(1, 2, 4, 8))
        uninstall()
    assert calls == [(1, 2, 4, 8)] * 6


CALLS = {
    "a length": (
        {"input_ids": TOKENS[:, :6]},
        {},
        r"forward_pre:<in>:0: expected a sequence length that is a multiple of 4.*got 6",
    ),
    "padding": (
        {"input_ids": TOKENS, "attention_mask": PADDED},
        {},
        r"layers\.0\.self_attn: .*got a mask of \(2, 1, 8, 8\).*plan_api\.attention_mask\(mask\)",
    ),
    "dropout": (
        {"input_ids": TOKENS},
        {"attention_dropout": 0.1},
        r"self_attn: .*got dropout_p=0.1.*attention_dropout=0.0 in transformers",
    ),
}


@needs_flattening
@pytest.mark.parametrize("name", CALLS)
def test_unsupported_calls_are_refused_with_the_remedy(cp, name, monkeypatch):
    monkeypatch.setattr("plan_api.options.find_spec", lambda _: None)
    batch, changes, message = CALLS[name]
    model = parallelize(llama(**changes), zoo.llama(cp, cp="cp"))
    with pytest.raises(ValueError, match=message):
        model(**batch)


@needs_flattening
def test_a_sequence_that_is_not_sharded_is_refused(cp, monkeypatch):
    monkeypatch.setattr("plan_api.options.find_spec", lambda _: None)
    plan = zoo.llama(cp).context(r"model\.layers\.\d+\.self_attn", "cp")
    model = parallelize(llama(), plan)
    with pytest.raises(ValueError, match=r"sharded along 'cp' by the sequence, Shard\(2\)"):
        model(input_ids=TOKENS)


@needs_flattening
def test_heads_without_an_attribute_are_refused_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr("plan_api.options.find_spec", lambda _: None)
    with fake_mesh((4,), ("cp",)) as mesh:
        plan = Plan(mesh).sequence("<in:input_ids>", "cp", order="contiguous")
        plan.sequence(r"model\.rotary_emb.<in:position_ids>", "cp", order="contiguous")
        plan.context(r"model\.layers\.\d+\.self_attn", "cp", method="ulysses")
        model = parallelize(llama(), plan)
        message = r"self_attn: expected .*key-value heads .*axis 'cp' of size 4 .*got 2"
        with pytest.raises(ValueError, match=message):
            model(input_ids=TOKENS)


def test_a_dtype_without_a_kernel_is_refused_with_the_remedy():
    whole = torch.ones(1, 2, 4, 8, dtype=torch.int64)
    with pytest.raises(
        NotImplementedError, match=r"no fused attention for torch.int64 on 'cpu'.*ul"
    ):
        select_kernel(whole, None)
