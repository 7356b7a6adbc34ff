"""Experts multiply quantized operands, with scales of their own, on one device and sharded."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fsdp
from plan_api import (
    MXFP8,
    Float8Block,
    Float8Rowwise,
    Float8Tensorwise,
    GatheredOperand,
    Plan,
    installed,
    parallelize,
    use_low_precision,
    zoo,
)
from plan_api.ops.low_precision.linear import LowPrecision, low_precision_linear
from testkit import CommLog, models, run_ranks

RECIPES = (
    Float8Tensorwise(),
    Float8Rowwise(),
    Float8Block("reference", 16),
    MXFP8("reference"),
)
IN_BLOCKS = RECIPES[2:]  # of tokens, too
R, P = Replicate(), Partial()
TOKENS, HIDDEN = 80, 64


class Layer(nn.Module):
    """The experts of Mixtral, and a router whose choices are given."""

    def __init__(self, way="eager", experts=4):
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        super().__init__()
        config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=96, num_local_experts=experts)
        config._experts_implementation = way
        self.experts = MixtralExperts(config)
        self._init_weights()

    def _init_weights(self):
        torch.manual_seed(1)
        for param in self.parameters():
            nn.init.normal_(param, std=0.1)

    def forward(self, x, index, weights):
        return self.experts(x, index, weights)


class Transposed(Layer):
    """The experts of GPT-OSS, whose products take the transposes of their weights."""

    def __init__(self, way="eager", experts=4):
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        nn.Module.__init__(self)
        config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=96, num_local_experts=experts)
        config._experts_implementation = way
        self.experts = GptOssExperts(config)
        self._init_weights()


def _inputs(experts=4):
    torch.manual_seed(2)
    x, logits = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, experts)
    logits[:, -1] -= 3  # few tokens choose the last expert
    weights, index = logits.softmax(-1).topk(2)
    return x, index, weights


def _full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _step(model, experts=4):
    """The output and all gradients."""
    x, index, weights = _inputs(experts)
    x.requires_grad_()
    weights.requires_grad_()
    y = _full_with_grad(model(x, index, weights))
    y.sin().sum().backward()
    params = {name: _full(param.grad) for name, param in model.named_parameters()}
    return {"y": y.detach(), "x": _full(x.grad), "weights": _full(weights.grad), **params}


def _full_with_grad(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reference(layer, recipe, way):
    """Experts one by one, each as a linear layer, with tokens in the order of an implementation."""
    precision = LowPrecision.on("", recipe, "cpu")
    experts = layer.experts

    def forward(x, index, weights):
        y = torch.zeros_like(x)
        sorted_experts, order = torch.sort(index.flatten())
        for expert in range(4):
            if way == "eager":
                choice, token = torch.where(index.t() == expert)
            else:
                own = order[sorted_experts == expert]
                token, choice = own // 2, own % 2
            up = low_precision_linear(x[token], experts.gate_up_proj[expert], None, precision)
            gate, up = up.chunk(2, -1)
            down = low_precision_linear(
                nn.functional.silu(gate) * up, experts.down_proj[expert], None, precision
            )
            y = y.index_add(0, token, down * weights[token, choice, None])
        return y

    layer.forward = forward
    return layer


def _different(found, expected, atol=0.0):
    return [
        name
        for name, one in expected.items()
        if not torch.allclose(found[name], one, rtol=0, atol=atol * one.abs().max().item())
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_each_expert_has_scales_of_its_own(recipe):
    without = _step(Layer())
    for way in ("eager", "grouped_mm"):
        layer = Layer(way)
        (handle,) = use_low_precision(layer, "experts", recipe)
        found = _step(layer)
        expected = _step(_reference(Layer(), recipe, way))
        # Sums over the experts of a token have an order of their own in grouped products.
        assert not _different(found, expected, atol=0 if way == "eager" else 1e-6)
        handle.remove()
        layer.zero_grad()
        assert not _different(_step(layer), without, atol=1e-6)
        off = [(found[name] - one).abs().max() / one.abs().max() for name, one in without.items()]
        assert all(1e-4 < one < 0.3 for one in off)


def test_experts_are_left_out_by_a_pattern_and_have_gradients_without_tokens():
    model = models.mixtral(hidden_size=64, intermediate_size=64)
    handles = use_low_precision(model, r"(?!(?:lm_head|.*\.experts)$).*", Float8Rowwise())
    assert len(handles) == 8  # projections of attention
    experts = [one for name, one in model.named_modules() if name.endswith("experts")]
    assert not any("forward" in vars(one) for one in experts)
    layer = Layer("grouped_mm")
    use_low_precision(layer, ".*", MXFP8("reference"))
    x, index, weights = _inputs()
    layer(x, torch.zeros_like(index), weights).sum().backward()
    assert layer.experts.down_proj.grad[0].any()
    assert not layer.experts.down_proj.grad[1:].any()


def test_what_experts_cannot_compute_is_refused():
    with pytest.raises(ValueError, match="got 'batched_mm'; set one of these"):
        use_low_precision(Layer("batched_mm"), "experts", Float8Rowwise())
    with pytest.raises(ValueError, match=r"dim 1 of gate_up_proj of experts in blocks of 128.*256"):
        use_low_precision(Layer(), "experts", Float8Block("reference"))
    layer = Layer()
    use_low_precision(layer, "experts", Float8Rowwise())
    layer.experts.config._experts_implementation = "batched_mm"
    with pytest.raises(ValueError, match="products by linear, matmul or grouped_mm, got"):
        layer(*_inputs())
    assert isinstance(layer.experts.down_proj, nn.Parameter)  # restored


def _expert_parallel(mesh):
    """Experts sharded by number, of which each rank computes its part of all tokens' outputs."""
    plan = Plan(mesh).shard(r"experts\.\w+", Shard(0), "ep")
    for at in (0, "top_k_weights"):
        plan.redistribute(f"experts.<in:{at}>", R, R, "ep", grad_src=P, grad_dst=R)
    plan.index(
        "experts.<in:top_k_index>", Shard(0), "ep", count="num_experts", flag="_is_expert_parallel"
    )
    return plan.local("experts", P, "ep").redistribute("<out>", P, R, "ep")


@pytest.mark.ranks
def test_expert_parallel_experts_have_the_bits_of_one_rank():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        for recipe in RECIPES:
            for way in ("eager", "grouped_mm"):
                one = Layer(way)
                use_low_precision(one, "experts", recipe)
                expected = _step(one)
                for mode in ("eager", "static"):
                    plan = _expert_parallel(mesh).precision(".*", recipe)
                    model = parallelize(Layer(way), plan, mode=mode)
                    assert list(installed(model).lowered.precisions) == ["experts"]
                    found = _step(model)
                    if way == "grouped_mm":  # sorts tokens, whose order depends on their number
                        compared = ("y", "weights") if recipe in IN_BLOCKS else tuple(expected)
                        assert not _different(found, {n: expected[n] for n in compared}, 1e-6)
                        continue
                    assert not _different(found, expected), (recipe, mode)

    run_ranks(check, 2, timeout=240)


def _gathered(make, recipe, quantize):
    """Three experts of fully_shard, whose boundary between two ranks is within an expert."""
    model, options = make(experts=3), {}
    use_low_precision(model, "experts", recipe)
    if quantize is not None:
        options["quantize_fn"] = lambda param: quantize if param.ndim == 3 else None
    fsdp.fully_shard(model, strategy="native", reshard_after_forward=True, **options)
    (group,) = model._get_fsdp_state().groups
    ends = [group.shard.layout.part(i, 0).stop for i in range(2)]
    whole = [param.shape[1] * param.shape[2] for param in model.parameters() if param.ndim == 3]
    assert any(end % one for end, one in zip(ends, whole, strict=False))
    with CommLog() as log:
        found = _step(model, experts=3)
    sent = sum(call.input_bytes for call in log.calls if call.op == "all_gather")
    maxima = sum(call.input_bytes for call in log.calls if call.op == "all_reduce")
    return found, sent, maxima


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("make", "way"),
    [
        (Layer, "grouped_mm"),
        pytest.param(Layer, "eager", marks=pytest.mark.slow),
        pytest.param(Transposed, "eager", marks=pytest.mark.slow),
        pytest.param(Transposed, "grouped_mm", marks=pytest.mark.slow),
    ],
)
def test_gathered_operands_of_experts_have_the_bits_of_quantizing_gathered_weights(make, way):
    def check():
        of_way = partial(make, way)
        for recipe in RECIPES:
            expected, plainly_sent, _ = _gathered(of_way, recipe, None)
            transposed = make is Transposed
            found, sent, maxima = _gathered(of_way, recipe, GatheredOperand(recipe, transposed))
            assert not _different(found, expected)
            # Each pass gathers the biases of GPT-OSS, too; one rank may have all of them.
            biases = 2 * sum(4 * one.numel() for name, one in found.items() if "bias" in name)
            assert sent - biases + maxima <= 0.27 * plainly_sent, recipe
            if transposed:  # unexpectedly, so that each pass gathers the operands of both
                found, more, _ = _gathered(of_way, recipe, GatheredOperand(recipe))
                assert not _different(found, expected)
                assert (more > 1.4 * sent) == GatheredOperand(recipe).differs_in_backward

    run_ranks(check, 2, timeout=240)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:plan-api reduces gradients one by one")
def test_mixtral_gathers_operands_of_experts_that_tensor_parallelism_shards():
    """With fully_shard of layers, in both modes, and with TP on 4 ranks."""

    def run(recipe, mode, mesh, **options):
        torch.manual_seed(4)
        model = models.mixtral(
            hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4
        )
        models.reinitialize(model, 1)
        plan = zoo.mixtral(mesh, tp="tp", dp="dp").precision(r".*\.experts", recipe)
        for path in (r"model\.layers\.\d+", ""):
            plan.fully_shard(path, "dp", **options)
        parallelize(model, plan, mode=mode, guard_steps=0)
        values = installed(model).lowered.shard_values
        ids = torch.arange(32).view(4, 8) % models.VOCABULARY
        with CommLog() as log:
            loss = model(input_ids=ids, labels=ids).loss
        sent = sum(call.input_bytes for call in log.calls if call.op in ("send", "all_gather"))
        loss.backward()
        grads = {name: _full(param.grad) for name, param in model.named_parameters()}
        names = {name.rpartition(".")[2] for name, one in values.items() if one.operand == recipe}
        return {"loss": _full(loss), **grads}, sent, names

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for recipe in RECIPES:
            for mode in ("eager", "static"):
                found, sent, names = run(recipe, mode, mesh)
                assert names == {"gate_up_proj", "down_proj"}
                expected, plainly_sent, names = run(recipe, mode, mesh, granularity=fsdp.Block(31))
                assert not names
                assert not _different(found, expected)
                assert sent < plainly_sent

    run_ranks(check, 4, timeout=500)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:plan-api reduces gradients one by one")
def test_mixtral_has_the_loss_of_one_device_with_dispatch_and_with_sharded_experts():
    """Tokens of an expert arrive in an order of their own, and sums over ranks round otherwise."""
    options = {"num_attention_heads": 8, "num_key_value_heads": 4}
    sizes = {"hidden_size": 64, "intermediate_size": 64}

    def check():
        dp, tp = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("dp", "tp"))
        plans = (
            lambda: zoo.mixtral(dp, tp=None, dp="dp", ep="dp"),
            lambda: zoo.mixtral(tp, sp=True, ep="tp"),
            lambda: zoo.mixtral(tp, ep="tp"),
            lambda: zoo.mixtral(tp),  # each expert is sharded
        )
        for recipe in RECIPES:
            one = models.mixtral(**options, **sizes)
            use_low_precision(one, r".*\.experts", recipe)
            expected = models.train(one, steps=3)
            for make in plans:
                losses = []
                for mode in ("eager", "static"):
                    plan = make().precision(r".*\.experts", recipe)
                    model = parallelize(models.mixtral(**options, **sizes), plan, mode=mode)
                    losses.append(models.train(model, steps=3))
                assert losses[0] == losses[1]
                assert losses[0] == pytest.approx(expected, abs=1e-3)

    run_ranks(check, 2, timeout=500)
