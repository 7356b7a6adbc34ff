"""Models of transformers that describe their masks, and calls that are refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from plan_api import AttentionMask, describe_masks, parallelize, zoo
from plan_api.context_parallel.attention import IMPLEMENTATIONS
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, fake_mesh, models

needs_flattening = pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
TOKENS = torch.zeros(2, 8, dtype=torch.long)


@needs_flattening
def test_windows_and_sinks_of_layers_are_those_of_the_calls(monkeypatch):
    """The first layer has a window of 4 tokens; no mask of queries and keys is made."""
    monkeypatch.setattr("plan_api.options.find_spec", lambda _: None)
    calls = []

    def attention(query, key, value, call, sinks=None):
        calls.append((call.mask, None if sinks is None else tuple(sinks.shape)))
        return torch.zeros_like(query)

    monkeypatch.setitem(IMPLEMENTATIONS, "ring", attention)
    with fake_mesh((2,), ("cp",)) as mesh:
        for name, sinks in (("gemma3", None), ("gpt_oss", (4,))):
            model = describe_masks(getattr(models, name)())
            parallelize(model, getattr(zoo, name)(mesh, tp=None, cp="cp"))
            model(input_ids=TOKENS)
            assert calls == [(AttentionMask(True, 4), sinks), (AttentionMask(True), sinks)]
            calls.clear()


def test_a_model_without_a_plan_is_refused():
    model = describe_masks(models.llama())
    with pytest.raises(
        ValueError, match=r"LlamaAttention: .*expects Plan.context.*parallelize\(\)"
    ):
        model(input_ids=TOKENS)


def test_another_model_is_refused():
    message = r"expected a model of transformers.*got a Linear; .*AttentionMask as attn_mask"
    with pytest.raises(ValueError, match=message):
        describe_masks(nn.Linear(2, 2))


def test_capped_scores_are_refused(monkeypatch):
    describe_masks(models.llama())
    found = "plan_api.context_parallel.described_masks.intercepted_calls"
    monkeypatch.setattr(found, lambda _: SimpleNamespace())
    one = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"Linear: expected scores without a cap.*softcap=30.0"):
        AttentionInterface()["plan_api"](nn.Linear(2, 2), one, one, one, softcap=30.0)


@needs_flattening
def test_attention_that_is_not_replaced_is_refused(monkeypatch):
    """Eager attention is products of matrices, whose mask is in the order of the sequence."""
    monkeypatch.setattr("plan_api.options.find_spec", lambda _: None)
    message = r"layers\.0\.self_attn: expected a call of scaled_dot_product.*got none.*describe_ma"
    with fake_mesh((2,), ("cp",)) as mesh:
        model = parallelize(models.llama(), zoo.llama(mesh, tp=None, cp="cp"))
        with pytest.raises(ValueError, match=message):
            model(input_ids=TOKENS)
