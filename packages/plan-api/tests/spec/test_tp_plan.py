"""The tensor parallelism that transformers' models bring along."""

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from plan_api import Plan, installed, lower, parallelize
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks


@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
def test_a_llama_trains_as_on_one_device():
    """With tied embeddings and without, in one call: torch's decisions are forgotten between."""

    def train(mesh, tied):
        model = models.llama(tie_word_embeddings=tied)
        plan = Plan.from_tp_plan(model, mesh)
        for name in ("input_ids", "labels"):
            plan.shard(f"<in:{name}>", Shard(0), "dp")
        parallelize(model, plan.shard("<out:loss>", [Replicate()] * 2))
        layer, head = model.model.layers[0], model.lm_head.weight
        placed = [layer.self_attn.q_proj.weight, layer.mlp.down_proj.weight, head]
        losses = models.train(model, steps=5)
        return losses, [one.placements[1] for one in placed], installed(model).coverage.unused_sites

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return [train(mesh, tied) for tied in (False, True)]

    losses = [
        models.train(models.llama(tie_word_embeddings=tied), steps=5) for tied in (False, True)
    ]
    for found in run_ranks(check, 4, timeout=240):
        for (actual, placements, never), native in zip(found, losses, strict=True):
            assert actual == pytest.approx(native, abs=1e-5, rel=0)
            assert placements == [Shard(0), Shard(1), Shard(0)]
            assert never == []


@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_mixture_of_experts_trains_as_on_one_device(name):
    """Each rank has a part of every expert; gradients of routers and tokens are summed."""
    make = getattr(models, name)

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = make()
        plan = Plan.from_tp_plan(model, mesh)
        parallelize(model, plan.shard("<out:loss>", Replicate()))
        experts = model.model.layers[0].mlp.experts
        sizes = [one.to_local().numel() / one.numel() for one in experts.parameters()]
        losses = models.train(model, steps=5)
        models.token_loss(model).backward()
        return losses, sizes, [one.grad.full_tensor().norm().item() for one in model.parameters()]

    alone = make()
    losses = models.train(alone, steps=5)
    models.token_loss(alone).backward()
    norms = [one.grad.norm().item() for one in alone.parameters()]
    for actual, sizes, found in run_ranks(check, 2, timeout=240):
        assert actual == pytest.approx(losses, abs=6e-5, rel=0)
        assert sizes == [0.5, 0.5]
        assert found == pytest.approx(norms, abs=1e-6, rel=1e-4)


def test_styles_become_placements(mesh):
    model = models.llama(attention_bias=True)
    model._tp_plan = {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "packed_colwise",
        "model.layers.*.mlp.absent": "colwise",
        "model.norm": "sequence_parallel",
        "model.embed_tokens": "embedding_colwise",
        "lm_head": "colwise_rep",
    }
    lowered = lower(Plan.from_tp_plan(model, mesh), model)
    done = {
        f"{op.path}.{op.tensor}": str(op.dst) for op in lowered.ops if "layers.1" not in op.path
    }
    attention = "model.layers.0.self_attn"
    assert (
        done
        | {
            f"{attention}.q_proj.weight": "S(0)",
            f"{attention}.q_proj.bias": "S(0)",
            f"{attention}.q_proj.<in>": "R",
            f"{attention}.o_proj.weight": "S(1)",
            f"{attention}.o_proj.<out>": "R",
            "model.layers.0.mlp.gate_proj.weight": "IS(0,2)",
            "model.norm.<in>": "S(1)",
            "model.embed_tokens.weight": "S(1)",
            "lm_head.weight": "S(0)",
            "lm_head.<out>": "R",
        }
        == done
    )
    assert f"{attention}.o_proj.bias" not in done


@pytest.mark.parametrize(
    ("rule", "style"),
    [
        ("model.layers.*.mlp", "moe_identity_expert"),
        ("model.layers.*.mlp.up_proj.weight", "colwise"),
    ],
)
def test_an_unknown_style_is_named_with_its_module(mesh, rule, style):
    model = models.llama()
    model._tp_plan = {rule: style}
    with pytest.raises(ValueError, match=rf"got '{style}' for '.*\(model\.layers\.0\.mlp"):
        Plan.from_tp_plan(model, mesh)


def test_a_model_without_a_tp_plan_is_refused(mesh):
    with pytest.raises(ValueError, match=r"a model with a _tp_plan, .* got Linear"):
        Plan.from_tp_plan(nn.Linear(4, 4), mesh)
