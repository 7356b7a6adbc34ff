"""A pipeline stage gets the entries of a plan that apply to it, and no others."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api import Float8Rowwise, Plan, installed, lower, parallelize, zoo
from plan_api.spec.path import PathKind
from testkit import models

R, P, S0 = Replicate(), Partial(), Shard(0)


class Ends(nn.Module):
    """Layers between an input and a result that has a loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): nn.Linear(4, 4) for index in range(3)})
        self.head = nn.Linear(4, 2)

    def forward(self, tokens, labels):
        return {"loss": self.head(tokens).sum() + labels.sum()}


class Middle(nn.Module):
    """The second layer of `Ends`, called with other arguments."""

    def __init__(self, model):
        super().__init__()
        self.layers = nn.ModuleDict({"1": model.layers["1"]})

    def forward(self, hidden, labels=None):
        return self.layers["1"](hidden)


def whole_plan(mesh):
    return (
        Plan(mesh)
        .shard("<in:tokens>", S0, "dp")
        .shard("<in:labels>", S0, "dp")
        .shard(r"layers\.\d+\.weight", S0, "tp")
        .shard(r"layers\.0\.bias", S0, "tp")
        .annotate(r".*\.weight\.grad", P, "dp")
        .redistribute(r"head.<in>", R, R, "tp", grad_src=P, grad_dst=R)
        .redistribute("<out:loss>", P, R, "dp")
    )


def stage_entries(mesh, **options):
    model = Ends()
    plan = whole_plan(mesh)
    part = plan.for_stage(Middle(model), model, **options)
    return [entry.path.text for entry in part.entries], part, plan


def test_a_stage_in_the_middle_has_entries_for_its_modules_and_arguments(mesh):
    texts, part, plan = stage_entries(mesh, last=False)
    assert texts == ["<in:labels>", r"layers\.\d+\.weight", r".*\.weight\.grad"]
    assert len(plan.entries) == 7
    assert part.mesh is mesh


def test_the_last_stage_has_those_of_the_models_output_too(mesh):
    texts, _, _ = stage_entries(mesh, last=True)
    assert texts[-1] == "<out:loss>"


def test_a_recipe_is_of_the_stages_that_have_linear_layers(mesh):
    model = Ends()
    model.norm = nn.LayerNorm(4)
    plan = Plan(mesh).precision(".*", Float8Rowwise())
    assert plan.for_stage(Middle(model), model, last=False).entries == plan.entries
    norm_only = nn.ModuleDict({"norm": model.norm})
    assert not plan.for_stage(norm_only, model, last=True).entries
    wrong = Plan(mesh).precision("norm", Float8Rowwise())
    with pytest.raises(ValueError, match="expected linear layers or experts"):
        lower(wrong.for_stage(norm_only, model, last=True), norm_only)


def test_an_entry_that_names_nothing_in_the_model_stays_and_is_refused(mesh):
    model = Ends()
    plan = Plan(mesh).shard(r"layer\.0\.weight", S0, "tp")
    stage = Middle(model)
    with pytest.raises(ValueError, match="no parameter or buffer has this name"):
        parallelize(stage, plan.for_stage(stage, model, last=False))


@pytest.mark.parametrize("path", ["(|layers.1).<in:0>", "(|layers.1).<out>"])
def test_an_entry_for_the_model_and_a_module_is_refused_where_only_one_is_whole(mesh, path):
    class Keyword(Middle):
        def forward(self, *, hidden):
            return self.layers["1"](hidden)

    model = Ends()
    plan = Plan(mesh).redistribute(path, R, R, "tp", grad_src=P, grad_dst=R)
    with pytest.raises(ValueError, match=r"got 'the model', .* and 'layers.1', .*; add an entry"):
        plan.for_stage(Keyword(model), model, last=False)


@pytest.mark.parametrize(
    "change", [lambda plan: plan, lambda plan: Plan.from_json(plan.to_json(), plan.mesh)]
)
def test_a_stage_with_a_reordered_sequence_needs_no_attention_of_its_own(mesh, change):
    """Also after it was written and read, and as a submodule."""
    model = models.llama(num_hidden_layers=1, attn_implementation="sdpa")
    stage = nn.Module()
    stage.model = nn.Module()
    stage.model.embed_tokens = model.model.embed_tokens
    stage.forward = lambda input_ids: stage.model.embed_tokens(input_ids)
    plan = zoo.llama(mesh, tp=None, cp="tp")
    part = change(plan.for_stage(stage, model, last=False))
    lower(part, stage)
    nested = nn.Module()
    nested.inner = stage
    lower(part.under("inner"), nested)
    part.of_stage = False
    with pytest.raises(ValueError, match=r"expected a context\(\) entry along 'tp'"):
        lower(part, stage)


def test_the_stages_of_a_zoo_plan_have_each_of_its_entries(mesh):
    model = models.llama(num_hidden_layers=2)
    plan = zoo.llama(mesh, "tp", "dp", sp=True, loss_parallel=True)
    ends = nn.Module()
    ends.model = nn.Module()
    ends.model.embed_tokens = model.model.embed_tokens
    ends.forward = lambda input_ids: ends.model.embed_tokens(input_ids)
    first = plan.for_stage(ends, model, last=False)
    assert [entry.path.text for entry in first.entries if entry.path.text.startswith("<in")] == [
        "<in:input_ids>"
    ]
    whole = plan.for_stage(model, model, last=True)
    assert whole.entries == plan.entries


def test_an_entry_for_a_tied_tensor_applies_under_the_name_that_the_stage_has(mesh):
    model = models.llama(num_hidden_layers=2, tie_word_embeddings=True)
    stage = nn.Module()
    stage.model = nn.Module()
    stage.model.embed_tokens = model.model.embed_tokens
    plan = (
        Plan(mesh).shard(r"lm_head\.weight", S0, "tp").annotate(r"lm_head\.weight\.grad", P, "dp")
    )
    plan.shard(r"model\.norm\.weight", S0, "tp")
    paths = [entry.path for entry in plan.for_stage(stage, model, last=False).entries]
    assert [path.kind for path in paths] == [PathKind.STATE, PathKind.GRADIENT]
    assert all(path.matches("model.embed_tokens.weight") for path in paths)
    assert plan.for_stage(model, model, last=True).entries == plan.entries


@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("use", [(), ("fused-comm",)], ids=["one by one", "in buckets"])
def test_gradients_made_without_hooks_are_reduced_on_request(mesh, mode, use):
    """As torch's pipelines make them: for the leaves of autograd's graph, by autograd.grad."""
    torch.manual_seed(0)
    plan = (
        Plan(mesh).redistribute("<in>", R, S0, "dp").annotate(r"weight\.grad", P, "dp")
        .redistribute("<out>", S0, R, "dp", grad_src=R, grad_dst=S0)
    )  # fmt: skip
    guard_steps = 0 if mode == "static" else None
    linear = nn.Linear(4, 4, bias=False)
    model = parallelize(linear, plan, mode=mode, use=use, guard_steps=guard_steps)
    gradients = installed(model).gradients
    (leaf,) = gradients.leaves(model.parameters())
    (param,) = model.parameters()
    assert (leaf is param) == (mode == "eager")
    with gradients.no_sync():
        loss = model(torch.ones(4, 4)).sum()
        (leaf.grad,) = torch.autograd.grad(loss, [leaf])
    gradients.reduce()
    assert param.grad.placements == param.placements
