"""The parallelism that transformers' models bring along."""

import functools
import math
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from plan_api import Plan, generate_static, installed, lower, parallelize, zoo
from plan_api.spec.entry import EntryKind
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, fake_mesh, models, run_ranks


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


PRODUCTS = {
    "fsdp": ("llama", (2,), {"fsdp": "fsdp"}, {}),
    "fsdp, tied": ("llama", (2,), {"fsdp": "fsdp"}, {"tie_word_embeddings": True}),
    "dp, no tp": ("gpt_oss", (2,), {"dp": "dp"}, {}),
    "ep": ("gpt_oss", (2,), {"ep": "ep"}, {}),
    "ep x fsdp": ("mixtral", (2,), {"ep": "ep", "fsdp": "ep"}, {}),
    "ep x fsdp of experts": ("qwen3_moe", (2, 2), {"ep": "ep", "fsdp": ("dp", "ep")}, {}),
    "ep x tp": ("qwen3_moe", (2, 2), {"tp": "tp", "ep": "ep", "fsdp": "ep"}, {}),
    "dp x tp of experts": ("mixtral", (2, 2), {"tp": "tp", "dp": "dp"}, {}),
}
FAST = ("fsdp, tied", "ep x fsdp")


@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in PRODUCTS],
)
def test_products_train_as_one_device(name, mode):
    """Losses, and the norms of the gradients of all parameters."""
    family, sizes, axes, changes = PRODUCTS[name]
    axes = {"tp": None} | axes
    names = ("dp", "ep") if axes.get("fsdp") == ("dp", "ep") else ("dp", "tp")
    if len(sizes) == 1:
        names = (next(axis for axis in axes.values() if axis),)
    elif "ep" in axes and axes["tp"]:
        names = ("ep", "tp")
    make = functools.partial(getattr(models, family), **changes)

    def check():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        model = make()
        plan = Plan.from_tp_plan(model, mesh, **axes)
        plan.shard("<out:loss>", [Replicate()] * len(sizes))
        if mode == "static":
            ids = torch.zeros(4, 8, dtype=torch.int64)
            plan = generate_static(plan, make(), {"input_ids": ids, "labels": ids})
        parallelize(model, plan, mode=mode)
        losses = models.train(model, steps=5)
        models.token_loss(model).backward()
        allocated = sum(one.to_local().numel() for one in model.parameters())
        return (
            losses,
            allocated,
            [one.grad.full_tensor().norm().item() for one in model.parameters()],
        )

    alone = make()
    losses = models.train(alone, steps=5)
    models.token_loss(alone).backward()
    norms = [one.grad.norm().item() for one in alone.parameters()]
    whole = sum(one.numel() for one in alone.parameters())
    for actual, allocated, found in run_ranks(check, math.prod(sizes), timeout=240):
        assert actual == pytest.approx(losses, abs=6e-5, rel=0)
        assert found == pytest.approx(norms, abs=1e-6, rel=1e-4)
        assert allocated < whole or name == "dp, no tp"


def train_by_sgd(model, steps=3):
    """Returns the loss of each step, and its gradients by the names of parameters.

    AdamW's steps do not depend on the scale of gradients, so its losses hide a factor.
    """
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = []
    for _ in range(steps):
        loss = models.token_loss(model)
        loss.backward()
        grads = {name: global_tensor(one.grad).clone() for name, one in model.named_parameters()}
        trained.append((loss.item(), grads))
        optimizer.step()
        optimizer.zero_grad()
    return trained


def global_tensor(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_train_alike(found, expected):
    for (loss, grads), (expected_loss, expected_grads) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-5, rel=0)
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            scale = expected_grads[name].abs().max().item()
            torch.testing.assert_close(
                grad, expected_grads[name], atol=1e-4 * scale + 1e-7, rtol=0,
                msg=lambda text, name=name: f"{name}: {text}",
            )  # fmt: skip


# Families, each with the axes and the changes to its config. Dropout draws one device's masks.
DROPOUT = {"attention_dropout": 0.1}
OF_TWO_RANKS = {
    "tp": [
        ("llama4", {}),
        ("aria", {}),
        ("granite_swa", DROPOUT),
        ("deepseek_v2", DROPOUT),
    ],
    "dp": [("llama4", {}), ("deepseek_v2", {}), ("deepseek_v3", {"attn_implementation": "sdpa"})],
}
FAMILIES = ["llama", "qwen3", "gemma3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
FAMILIES += ["llama4", "aria", "granite_swa", "deepseek_v2"]


def plan_along(model, mesh):
    """Returns the plan of a model along those of the axes that the mesh has."""
    axes = mesh.mesh_dim_names
    plan = Plan.from_tp_plan(
        model, mesh, "tp" if "tp" in axes else None, dp="dp" if "dp" in axes else None
    )
    return plan.shard("<out:loss>", [Replicate()] * len(axes))


def train_in(mode, make, mesh):
    """Trains a model by its own plan, along the axes of a mesh."""
    model = make()
    plan = plan_along(model, mesh)
    if mode == "static":
        ids = torch.zeros(4, 8, dtype=torch.int64)
        plan = generate_static(plan, make(), {"input_ids": ids, "labels": ids})
    parallelize(model, plan, mode=mode)
    return train_by_sgd(model)


@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
@pytest.mark.parametrize("axis", OF_TWO_RANKS)
def test_gradients_are_those_of_one_device(axis):
    """Of models with styles of their own: packed rows, latents, and sinks of attention."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
        trained = []
        for family, changes in OF_TWO_RANKS[axis]:
            model = models.nowhere_zero(getattr(models, family)(**changes))
            parallelize(model, plan_along(model, mesh))
            trained.append(train_by_sgd(model))
        return trained

    expected = [
        train_by_sgd(models.nowhere_zero(getattr(models, family)(**changes)))
        for family, changes in OF_TWO_RANKS[axis]
    ]
    for found in run_ranks(check, 2, timeout=240):
        for one, other in zip(found, expected, strict=True):
            assert_train_alike(one, other)


# Models whose own code creates tensors, with the sizes of their configs.
_RECURRENT = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
_FEW_EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}  # fmt: skip
_MAMBA = {"mamba_d_state": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False}
CREATING = {
    "Phimoe": _FEW_EXPERTS,
    "MiniMax": _FEW_EXPERTS
    | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "Qwen3Next": _RECURRENT | _FEW_EXPERTS | {"shared_expert_intermediate_size": 48, "head_dim": 8},
    "OlmoHybrid": _RECURRENT | {"num_key_value_heads": 4},
    "Jamba": _FEW_EXPERTS
    | _MAMBA
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "Llama4": {
        "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4, "moe_layers": [1],
        "no_rope_layers": [1, 0], "attn_temperature_tuning": True, "floor_scale": 4,
    },
}  # fmt: skip
CREATING_IN_FAST_TESTS = ("Phimoe", "MiniMax")


@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
@pytest.mark.parametrize(
    ("mode", "axis", "names"),
    [
        ("eager", "tp", CREATING_IN_FAST_TESTS),
        *(
            pytest.param(mode, axis, (*CREATING,), marks=pytest.mark.slow)
            for mode in ("eager", "static")
            for axis in ("tp", "dp")
        ),
    ],
)
def test_models_that_create_tensors_have_the_gradients_of_one_device(mode, axis, names):
    """Recurrent layers, frequencies made in each call, and scales by positions."""

    def make(name):
        return models.nowhere_zero(models.causal_lm(name, **CREATING[name]))

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
        return [train_in(mode, functools.partial(make, name), mesh) for name in names]

    expected = [train_by_sgd(make(name)) for name in names]
    for found in run_ranks(check, 2, timeout=300):
        for one, other in zip(found, expected, strict=True):
            assert_train_alike(one, other)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_gradients_of_dp_x_tp_are_those_of_one_device(mode, family):
    def make():
        return models.nowhere_zero(getattr(models, family)())

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return train_in(mode, make, mesh)

    expected = train_by_sgd(make())
    for found in run_ranks(check, 4, timeout=300):
        assert_train_alike(found, expected)


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


@pytest.mark.parametrize("tied", [False, True])
def test_fully_shard_is_applied_to_the_modules_that_a_model_names(mesh, tied):
    """Parameters that it keeps are not gathered again in backward; tied ones are the root's."""
    plan = Plan.from_tp_plan(models.llama(tie_word_embeddings=tied), mesh, None, fsdp="dp")
    found = {
        entry.path.text: dict(entry.options)["reshard_after_forward"]
        for entry in plan.entries
        if entry.kind is EntryKind.FULLY_SHARD
    }
    layers = {r"model\.layers\.\d+": None, r"model\.norm": False, "": None}
    apart = {r"model\.embed_tokens": None, "lm_head": False}
    assert found == layers | ({} if tied else apart)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mixtral", "qwen3_moe"])
def test_parameters_are_placed_as_by_the_zoo(name):
    """But for the head, whose classes transformers shards."""
    model = getattr(models, name)()
    axes = {"tp": "tp", "dp": "ep"} | ({"ep": "ep"} if "experts" in str(model) else {})
    with fake_mesh((2, 2), ("ep", "tp")) as mesh:
        found, expected = (
            {
                parameter: schedule.run
                for parameter, schedule in lower(plan, model).schedules.items()
                if not re.search("lm_head|embed_tokens", parameter)
            }
            for plan in (
                Plan.from_tp_plan(model, mesh, **axes),
                getattr(zoo, name)(mesh, **axes),
            )
        )
    assert found == expected
    assert any(placement.is_shard() for run in found.values() for placement in run)


@pytest.mark.parametrize(
    ("rule", "style"),
    [
        ("model.layers.*.mlp", "moe_identity"),
        ("model.layers.*.mlp.up_proj.weight", "embedding_rowwise"),
    ],
)
def test_an_unknown_style_is_named_with_its_module(mesh, rule, style):
    model = models.llama()
    model._tp_plan = {rule: style}
    with pytest.raises(ValueError, match=rf"got '{style}' for '.*\(model\.layers\.0\.mlp"):
        Plan.from_tp_plan(model, mesh)


def test_experts_that_return_their_input_are_refused(mesh):
    model = models.mixtral()
    model._tp_plan = {"model.layers.*.mlp.experts.act_fn": "moe_identity_expert"}
    with pytest.raises(ValueError, match=r"each of which would add those of experts .*tp out"):
        Plan.from_tp_plan(model, mesh)


@pytest.mark.parametrize("module", ["DogeAttention", "InklingTopkRouter"])
def test_layers_of_which_dtensors_have_no_backward_are_refused(mesh, module):
    model = models.llama()
    model.model.layers[1].mlp = type(module, (nn.Identity,), {})()
    with pytest.raises(ValueError, match=rf"got {module} \(model\.layers\.1\.mlp\)"):
        Plan.from_tp_plan(model, mesh)


def test_recurrent_layers_are_replicated(mesh):
    """Also where the plan of the model shards their projections, and gathers what they make."""
    model = models.causal_lm("Qwen3Next", **CREATING["Qwen3Next"])
    assert model._tp_plan["model.layers.*.linear_attn.in_proj_ba"] == "colwise_gather_output"
    schedules = lower(Plan.from_tp_plan(model, mesh), model).schedules
    assert schedules["model.layers.1.self_attn.q_proj.weight"].run == (Replicate(), Shard(0))
    assert not any(
        placement.is_shard()
        for name, schedule in schedules.items()
        if "linear_attn" in name
        for placement in schedule.run
    )


def test_parameters_of_experts_that_no_rule_shards_are_refused(mesh):
    model = models.mixtral()
    model._tp_plan = {
        rule: style for rule, style in model._tp_plan.items() if "down_proj" not in rule
    }
    with pytest.raises(ValueError, match=r"none for model\.layers\.0\.mlp\.experts\.down_proj"):
        Plan.from_tp_plan(model, mesh)


def test_rules_for_parameters_become_placements(mesh):
    model = models.granite_swa()
    model._tp_plan |= {"model.layers.*.mlp.up_proj.weight": "rowwise"}
    plan = Plan.from_tp_plan(model, mesh)
    placed = {f"{op.path}.{op.tensor}": str(op.dst) for op in lower(plan, model).ops}
    assert placed["model.layers.0.self_attn.sinks"] == "S(0)"
    assert placed["model.layers.0.mlp.up_proj.weight"] == "S(1)"


def test_masks_are_declared_where_a_layer_takes_them(mesh):
    """Layers of one list may take different arguments."""
    model = models.llama()
    model.model.layers[1].self_attn = nn.Linear(4, 4)
    model._tp_plan = {"model.layers.0.self_attn.q_proj": "colwise"}
    plan = Plan.from_tp_plan(model, mesh)
    sites = {op.path for op in lower(plan, model).ops if op.tensor == "<in>"}
    assert sites >= {"model.layers.0.self_attn", "model.layers.0", "model.layers.1"}
    assert "model.layers.1.self_attn" not in sites


@pytest.mark.parametrize(
    ("plan", "rule", "style", "axes", "message"),
    [
        (
            "_ep_plan", "model.layers.*.mlp.experts.down_proj", "rowwise", {"ep": "tp"},
            "among ep_dispatch_experts, grouped_gemm, got 'rowwise'",
        ),
        (
            "_fsdp_plan", "model.norm", "keep", {"fsdp": "tp"},
            "among free_full_weight, keep_full_weight, got 'keep'",
        ),
    ],
)  # fmt: skip
def test_an_unknown_style_of_another_plan_is_named(mesh, plan, rule, style, axes, message):
    model = models.mixtral()
    setattr(model, plan, getattr(model, plan) | {rule: style})
    with pytest.raises(ValueError, match=message):
        Plan.from_tp_plan(model, mesh, None, **axes)


@pytest.mark.parametrize(
    ("make", "axes", "message"),
    [
        (models.llama, {"tp": None, "ep": "tp"}, "with a _ep_plan, .* got Llama.*; leave ep out"),
        (models.llama, {"tp": None, "fsdp": "fdsp"}, "axes .*, not 'fdsp'"),
        (models.llama, {"tp": None, "dp": "replicas"}, "axes .*, not 'replicas'"),
        (models.mixtral, {"tp": None, "ep": "experts"}, "axes .*, not 'experts'"),
    ],
)
def test_axes_without_a_plan_or_a_mesh_are_refused(mesh, make, axes, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_tp_plan(make(), mesh, **axes)


def test_a_model_without_a_tp_plan_is_refused(mesh):
    with pytest.raises(ValueError, match=r"a model with a _tp_plan, .* got Linear; leave tp out"):
        Plan.from_tp_plan(nn.Linear(4, 4), mesh)
