"""Which communication of a plan overlaps with products, and why other does not."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api import Float8Rowwise, Plan, explain, parallelize, zoo
from plan_api.lowering.lower import lower
from plan_api.lowering.overlap import find_overlaps
from testkit import fake_mesh, models

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
LAYER = r"model\.layers\.\d+"


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def mlp_plan(mesh, **grads):
    plan = Plan(mesh).shard(r"up\.(weight|bias)", S0, "tp").shard("down.weight", S1, "tp")
    plan.redistribute("<in>", S1, R, "tp", **({"grad_src": P, "grad_dst": S1} | grads))
    return plan.redistribute("<out>", P, S1, "tp")


def found(plan, model, axis="tp"):
    overlaps = find_overlaps(lower(plan, model, mode="static"), model, plan.mesh, axis)
    return {
        f"{one.path}.{one.hook_point.value}": one.reason
        or (one.forward, one.backward, *(name.rpartition(".")[2] for name in one.linears))
        for one in overlaps
    }


@pytest.mark.parametrize("sp", [True, False])
def test_communication_around_all_projections_of_llama_overlaps(mesh, sp):
    overlaps = found(zoo.llama(mesh, dp="dp", sp=sp, loss_parallel=True), models.llama())
    gather = ("all-gather", "reduce-scatter") if sp else ("", "all-reduce")
    reduce = ("reduce-scatter", "all-gather") if sp else ("all-reduce", "")
    layers = {
        f"model.layers.{number}.{site}": overlap
        for number in range(2)
        for site, overlap in {
            "self_attn.forward_pre": (*gather, "q_proj", "k_proj", "v_proj"),
            "mlp.forward_pre": (*gather, "gate_proj", "up_proj"),
            "self_attn.forward": (*reduce, "o_proj"),
            "mlp.forward": (*reduce, "down_proj"),
        }.items()
    }
    # Its weight is the table of embeddings, which is named first.
    assert overlaps.pop("lm_head.forward_pre") == (*gather, "lm_head")
    assert overlaps == layers


def test_experts_have_no_linear_and_the_router_does_not_gather(mesh):
    overlaps = found(zoo.mixtral(mesh, dp="dp", sp=True, ep="tp"), models.mixtral())
    assert overlaps["model.layers.0.self_attn.forward"] == (
        "reduce-scatter", "all-gather", "o_proj",
    )  # fmt: skip
    assert not any("mlp" in name for name in overlaps)
    overlaps = found(zoo.mixtral(mesh, dp="dp", sp=True), models.mixtral())
    assert "no Linear here is sharded" in overlaps["model.layers.0.mlp.forward"]


@pytest.mark.parametrize(
    ("change", "site", "reason"),
    [
        (lambda plan: plan.redistribute("<in>", S0, R, "dp"), ".forward_pre", "along dp as well"),
        (lambda plan: plan.eager("down").recompute(""), ".forward", "recomputed without its hooks"),
        (lambda plan: plan.shard("up.weight", R, "tp"), ".forward_pre", "no Linear here is"),
        (lambda plan: plan.shard("up.weight", S0, "dp"), ".forward_pre", "another axis too"),
        (
            lambda plan: plan.redistribute("up.bias", S0, S0, "tp"),
            ".forward_pre",
            "while up runs",
        ),
        (lambda plan: plan.shard("down.weight", S1, "dp"), ".forward", "another axis too"),
        (lambda plan: plan.precision("down", Float8Rowwise()), ".forward", "in low precision"),
    ],
)
def test_what_does_not_overlap_has_a_reason(mesh, change, site, reason):
    model = Mlp()
    assert isinstance(found(mlp_plan(mesh), model)[site], tuple)
    assert reason in found(change(mlp_plan(mesh)), model)[site]


def test_a_gradient_that_is_not_reduced_does_not_overlap(mesh):
    overlaps = found(mlp_plan(mesh, grad_src=R, grad_dst=S1), Mlp())
    assert "its gradient" in overlaps[".forward_pre"]


def test_a_linear_with_a_forward_of_its_own_is_left_out(mesh):
    model = Mlp()
    model.up.forward = model.up.forward
    assert found(mlp_plan(mesh), model)[".forward_pre"] == "up has a forward of its own"


def test_several_products_of_which_one_may_be_the_output_are_left_out(mesh):
    model = Mlp()
    model.more = nn.Linear(16, 8, bias=False)
    plan = mlp_plan(mesh).shard("more.weight", S1, "tp")
    assert found(plan, model)[".forward"].startswith("several Linears here")


def test_explain_lists_what_overlaps(mesh):
    rows = explain(zoo.llama(mesh, dp="dp", sp=True), models.llama(), overlap="tp").rows
    rows = {(row.site, row.tensor): row for row in rows if row.hook == "overlap"}
    row = rows["model.layers.1.mlp", "<in>:0"]
    assert row.after == "all-gather beside gate_proj, up_proj"
    assert (
        row.gradient == "reduce-scatter beside the gradients of the weights of gate_proj, up_proj"
    )
    row = rows["model.layers.1.self_attn", "<out>:0"]
    assert row.after == "reduce-scatter beside o_proj"
    assert row.gradient == "all-gather beside the gradient of o_proj"
    assert rows["lm_head", "<in>:0"].after.startswith("not overlapped: ")
    assert all("llama.py" in row.line for row in rows.values())


@pytest.mark.parametrize(
    ("axis", "change", "message"),
    [
        ("ep", lambda plan: plan, "expected an axis of the plan's mesh, one of dp, tp"),
        ("dp", lambda plan: plan, "the plan has none; leave it out"),
        (
            "tp",
            lambda plan: plan.compile(rf"{LAYER}", "eager"),
            "expected modules that are not compiled.*got .*compile",
        ),
    ],
)
def test_an_overlap_without_effect_is_refused(mesh, axis, change, message):
    plan, model = change(zoo.llama(mesh, dp="dp", sp=True)), models.llama()
    with pytest.raises(ValueError, match=message):
        parallelize(model, plan, overlap=axis)
    with pytest.raises(ValueError, match=message):
        explain(plan, model, overlap=axis)
    assert not model._forward_pre_hooks


def test_explain_names_the_operators_of_cuda_that_may_take_the_place_of_sends():
    for device_type, fused in (("cpu", ""), ("cuda", " (fused_{} if ranks have symmetric memory)")):
        gather, scatter = (
            fused.format(one) for one in ("all_gather_matmul", "matmul_reduce_scatter")
        )
        with fake_mesh((2,), ("tp",), device_type=device_type) as mesh:
            rows = explain(mlp_plan(mesh), Mlp(), overlap="tp").rows
            replicated = explain(zoo.llama(mesh), models.llama(), overlap="tp").rows
        rows = {row.tensor: (row.after, row.gradient) for row in rows if row.hook == "overlap"}
        assert rows["<in>:0"] == (
            f"all-gather{gather} beside up",
            f"reduce-scatter{scatter} beside the gradients of the weights of up",
        )
        assert rows["<out>:0"] == (
            f"reduce-scatter{scatter} beside down",
            f"all-gather{gather} beside the gradient of down",
        )
        assert any(row.after == "all-reduce beside o_proj" for row in replicated)
