"""Plans for static mode, generated from plans for Eager."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api import (
    AttentionMask,
    Plan,
    attention_mask,
    describe_masks,
    generate_static,
    installed,
    parallelize,
    plan_communication,
    zoo,
)
from testkit import (
    FLATTENS_TWO_SHARDED_DIMS,
    NO_FLATTENING,
    TORCH_RELEASE,
    CommLog,
    models,
    run_ranks,
)

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]

R, S0, S1 = Replicate(), Shard(0), Shard(1)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
STEPS = 20
SLOW = pytest.mark.slow


def qwen():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, use_cache=False,
        attn_implementation="eager", attention_dropout=0.1, max_window_layers=0, **HEADS,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train()


def tokens():
    ids = torch.randint(0, 64, (4, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def script(mesh, *made):
    """Entries for all models: the batch is sharded, tensors that the model creates replicated."""
    plan = Plan(mesh).shard("<in:input_ids>", S0, "dp").shard("<in:labels>", S0, "dp")
    for path in made:
        plan.shard(path, [R, R])
    return plan.shard("<out:loss>", [R, R])


def sharded_layers(plan, layer, weights, whole):
    """Shards weights of layers along tp, and replicates tensors between layers."""
    for path, placement in weights.items():
        plan.shard(rf"{layer}\.{path}", placement, "tp")
    for path in whole:
        plan.shard(rf"{layer}\.{path}", R, "tp")
    return plan


def of_llama(mesh):
    layer = r"model\.layers\.\d+"
    plan = script(mesh, r"model\.rotary_emb.<in:position_ids>", rf"{layer}.<in:attention_mask>")
    weights = {r".*\.(q|k|v|gate|up)_proj\.weight": S0, r".*\.(o|down)_proj\.weight": S1}
    return sharded_layers(plan, layer, weights, ["(self_attn|mlp).<in>", "(self_attn|mlp).<out>"])


def of_gpt2(mesh):
    """Its code has global sizes: of a fused projection, and of what it splits."""
    from ragged_shard import InterleavedShard

    layer = r"transformer\.h\.\d+"
    weights = {
        r"attn\.c_attn\.weight": InterleavedShard(1, 3),
        r"attn\.c_attn\.bias": InterleavedShard(0, 3),
        r"mlp\.c_fc\.weight": S1,
        r"mlp\.c_fc\.bias": S0,
        r".*\.c_proj\.weight": S0,
    }
    whole = ["(attn|mlp).<in>", r"(attn|mlp)\.c_proj.<out>"]
    plan = script(mesh, r"transformer\.wpe.<in>", rf"{layer}.<in:attention_mask>")
    return sharded_layers(plan, layer, weights, whole)


def of_qwen(mesh):
    """The model's own plan, with the vocabulary sharded in the embedding and in the head."""
    layer = r"model\.layers\.\d+"
    made = (r"model\.rotary_emb.<in:position_ids>", rf"{layer}.<in:attention_mask>")
    return Plan.from_tp_plan(qwen(), mesh) | script(mesh, *made)


def images():
    return {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 10, (4,))}


def of_vit(mesh):
    layer = r"vit\.layers\.\d+"
    plan = Plan(mesh).shard("<in:pixel_values>", S0, "dp").shard("<in:labels>", S0, "dp")
    weights = {
        r".*\.(q|k|v)_proj\.(weight|bias)": S0,
        r".*\.fc1\.(weight|bias)": S0,
        r".*\.(o_proj|fc2)\.weight": S1,
    }
    whole = ["(attention|mlp).<in>", "(attention|mlp).<out>"]
    return sharded_layers(plan.shard("<out:loss>", [R, R]), layer, weights, whole)


CASES = {
    "llama": (lambda: models.llama(attention_dropout=0.1, **HEADS), of_llama, tokens),
    "gpt2": (models.gpt2, of_gpt2, tokens),
    "gpt2, one layer": (partial(models.gpt2, n_layer=1), of_gpt2, tokens),
    "qwen": (qwen, of_qwen, tokens),
    "vit": (models.vit, of_vit, images),
}


def train(model, batch, steps=4):
    return models.train(model, lambda model: model(**batch()).loss, steps=steps)


def generated(name, shape):
    """Returns the plan of a model, the losses of both modes under it, and a plan made on meta.

    Of the latter whether it is the same, and the bytes sent for it.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    make, plan_of, batch = CASES[name]
    torch.manual_seed(5)
    model = make()
    before = [param.clone() for param in model.parameters()]
    made = generate_static(plan_of(mesh), model, batch())
    assert all(map(torch.equal, before, model.parameters()))
    assert not any(hooks for one in model.modules() for hooks in one._forward_hooks)
    again = Plan.from_json(made.to_json(), mesh)
    assert again.entries == made.entries
    static = parallelize(model, again, mode="static")
    assert installed(static).check(**batch()) == ()
    eager = parallelize(make(), made)
    with torch.device("meta"):
        on_meta = make()
    with CommLog() as sent:
        without_memory = generate_static(plan_of(mesh), on_meta, batch(), fake=True)
    assert all(param.is_meta for param in on_meta.parameters())
    meta = without_memory.entries == made.entries, sent.bytes()
    return str(made), train(static, batch), train(eager, batch), meta


# What lines of the plans contain.
LINES = {
    "llama": (
        r"self_attn\.<in:0>', dp=S\(0\)->S\(0\)",
        r"self_attn.<in:0>.*tp=R->R \(gradient P\(sum\)->R\)",
    ),
    "gpt2": (
        r"c_attn\.<op:view:1>', tp=S\(2\)",
        r"attn\.<op:split:0>', tp=S\(2\)",
        r"c_proj\\\\.bias', tp=R->P\(sum\)",
    ),
    "qwen": (
        r"embed_tokens\.<op:embedding:0>', tp=S\(0\)",
        r"embed_tokens\.<out:0>', dp=S\(0\)->S\(0\)",
    ),
    "vit": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_generated_plans_train_as_in_eager_and_are_the_same_on_meta(name):
    for plan, static, eager, (same, sent) in run_ranks(generated, 2, name, (1, 2), timeout=580):
        assert static == eager
        assert same
        assert sent < 10_000  # hashes of plans, which the ranks compare
        for line in LINES[name.partition(",")[0]]:
            assert re.search(line, plan)


class Attention(nn.Module):
    """Attention whose heads have a learned temperature and distance penalty each."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.v, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.temperature, self.penalty = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.drop = nn.Dropout(0.1)

    def forward(self, x, distance):
        q, k, v = (
            one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(2, 3) * self.temperature.view(-1, 1, 1)
        scores = scores - distance * self.penalty.view(-1, 1, 1)
        scores = scores.masked_fill(distance < 0, float("-inf"))
        mixed = self.drop(torch.softmax(scores, -1)) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated MLP, whose output has a scale of its own."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.scale = nn.Parameter(torch.full((32,), 0.5))

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.gate(x)) * self.up(x)) * self.scale


class Layer(nn.Module):
    """Attention and MLP beside each other, on one norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(32), Attention(), Gated()

    def forward(self, x, distance):
        normed = self.norm(x)
        return x + self.attention(normed, distance) + self.mlp(normed)


class Own(nn.Module):
    """A transformer that no library has, with a loss that also penalizes large logits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids, labels):
        at = torch.arange(input_ids.shape[1])
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x, at.view(-1, 1) - at)
        logits = self.head(self.norm(x))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss + 1e-3 * logits.logsumexp(-1).square().mean()}


def of_own(mesh):
    plan = Plan(mesh).shard("<in:input_ids>", R, "tp").shard("<in:labels>", R, "tp")
    plan.factory("", R, "tp")
    layer = r"layers\.\d+"
    weights = {
        r"attention\.(q|k|v|temperature|penalty)(\.weight|\.bias)?": S0,
        r"mlp\.(gate|up)\.(weight|bias)": S0,
        r".*\.(out|down)\.weight": S1,
    }
    return sharded_layers(plan, layer, weights, [r"(attention\.out|mlp\.down).<out>"])


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, head_dim=8,
        use_cache=False, attn_implementation="eager", attention_dropout=0.1, max_window_layers=0,
        tie_word_embeddings=True, **HEADS,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).train()


def neox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64,
        num_attention_heads=8, use_cache=False, attn_implementation="eager",
        attention_dropout=0.1, hidden_dropout=0.1,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).train()


def own_plan(mesh, make, prefix, layers):
    """The model's own plan, with a sharded batch."""
    made = (rf"{prefix}\.rotary_emb.<in:position_ids>", rf"{layers}.<in:attention_mask>")
    return Plan.from_tp_plan(make(), mesh) | script(mesh, *made)


def of_neox(mesh):
    layer = r"gpt_neox\.layers\.\d+"
    plan = script(mesh, r"gpt_neox\.rotary_emb.<in:position_ids>", rf"{layer}.<in:attention_mask>")
    weights = {
        r".*\.(query_key_value|dense_h_to_4h)\.(weight|bias)": S0,
        r".*\.(dense|dense_4h_to_h)\.weight": S1,
    }
    return sharded_layers(plan, layer, weights, [r".*\.(dense|dense_4h_to_h).<out>"])


def of_mixtral(mesh):
    from ragged_shard import InterleavedShard

    layer = r"model\.layers\.\d+"
    plan = script(mesh, r"model\.rotary_emb.<in:position_ids>", rf"{layer}.<in:attention_mask>")
    weights = {
        r".*\.(q|k|v)_proj\.weight": S0,
        r".*\.o_proj\.weight": S1,
        r"mlp\.experts\.gate_up_proj": InterleavedShard(1, 2),
        r"mlp\.experts\.down_proj": Shard(2),
    }
    plan = sharded_layers(plan, layer, weights, [r"self_attn\.o_proj.<out>", "mlp.<out>"])
    return plan.local(rf"{layer}\.mlp\.experts", Partial(), "tp")


llama = partial(models.llama, attention_dropout=0.1, **HEADS)
mixtral = partial(models.mixtral, attention_dropout=0.1, **HEADS)
OF_MODEL = ("model", r"model\.layers\.\d+")
OF_NEOX = ("gpt_neox", r"gpt_neox\.layers\.\d+")
TRAINED = {
    "llama, by hand": (llama, of_llama, tokens),
    "llama, zoo": (llama, partial(zoo.llama, dp="dp"), tokens),
    "llama, zoo, sequence parallel": (llama, partial(zoo.llama, dp="dp", sp=True), tokens),
    "llama, tp_plan": (llama, lambda mesh: own_plan(mesh, llama, *OF_MODEL), tokens),
    "mixtral, by hand": (mixtral, of_mixtral, tokens),
    "mixtral, zoo": (mixtral, partial(zoo.mixtral, dp="dp"), tokens),
    "gpt2, by hand": (models.gpt2, of_gpt2, tokens),
    "gpt2, zoo": (models.gpt2, partial(zoo.gpt2, dp="dp"), tokens),
    "vit, by hand": (models.vit, of_vit, images),
    "vit, zoo": (models.vit, partial(zoo.vit, dp="dp"), images),
    "qwen3, tied, by hand": (qwen3, of_llama, tokens),
    "qwen3, tied, tp_plan": (qwen3, lambda mesh: own_plan(mesh, qwen3, *OF_MODEL), tokens),
    "gpt-neox, by hand": (neox, of_neox, tokens),
    "gpt-neox, tp_plan": (neox, lambda mesh: own_plan(mesh, neox, *OF_NEOX), tokens),
    "a model of its own": (Own, of_own, tokens),
}


def trained_in_both_modes(name, shape):
    """Trains by the plan with planned communication in Eager, and by the generated plan."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    make, plan_of, batch = TRAINED[name]
    written, found = plan_of(mesh), []
    torch.manual_seed(5)
    planned = plan_communication(written, make(), batch(), fake="mixtral" not in name)
    generated = generate_static(written, make(), batch())
    for plan, mode in ((planned, "eager"), (generated, "static")):
        model = parallelize(make(), plan, mode=mode)
        losses = models.train(model, lambda model: loss_of(model, batch()), steps=STEPS)
        params = {name: one.detach().to_local() for name, one in model.named_parameters()}
        found.append((losses, params))
    check = installed(model).check(**batch())
    return *found, [str(difference) for difference in check], installed(model).lowered.eager


def loss_of(model, batch):
    return model(**batch)["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=["2 ranks", "4 ranks"])
@pytest.mark.parametrize("name", TRAINED)
def test_generated_plans_train_twenty_steps_to_the_bits_of_eager(name, shape):
    """With its collectives, and without a module on DTensors."""
    ranks = run_ranks(trained_in_both_modes, shape[0] * shape[1], name, shape, timeout=580)
    for (losses, params), (static_losses, static_params), differences, on_dtensors in ranks:
        assert len(set(losses)) == STEPS
        assert static_losses == losses
        different = [
            name for name, one in params.items() if not torch.equal(one, static_params[name])
        ]
        assert different == []
        assert differences == []
        assert on_dtensors == ()


def of_dispatched(mesh, **options):
    layer = r"model\.layers\.\d+"
    plan = script(mesh, r"model\.rotary_emb.<in:position_ids>", rf"{layer}.<in:attention_mask>")
    experts = rf"{layer}\.mlp\.experts"
    plan.shard(rf"{experts}\.\w+", S0, "dp").local(experts, S0, "dp")
    options |= {"weights": "top_k_weights", "count": "num_experts"}
    return plan.dispatch(f"{experts}.<in:top_k_index>", S0, "dp", **options)


@pytest.mark.skipif(
    TORCH_RELEASE < (2, 12), reason="torch 2.11's topk of a DTensor has no backward"
)
@pytest.mark.parametrize(
    ("ranks", "chunks", "steps", "experts"),
    [
        pytest.param(2, 1, 3, "grouped_mm", marks=SLOW),
        pytest.param(2, 1, STEPS, "batched_mm", marks=SLOW),
        pytest.param(4, 3, STEPS, "grouped_mm", marks=SLOW),
    ],
)
def test_a_generated_plan_that_dispatches_tokens_trains_as_one_device(
    ranks, chunks, steps, experts
):
    """And is the same if it is made without values, on which the experts' code does not depend."""
    make = partial(models.mixtral, attention_dropout=0.1, experts_implementation=experts, **HEADS)

    def check():
        mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))
        written, found = of_dispatched(mesh, chunks=chunks), []
        generated = generate_static(written, make(), tokens())
        with torch.device("meta"):
            on_meta = make()
        same = generate_static(written, on_meta, tokens(), fake=True).entries == generated.entries
        for mode in ("eager", "static"):
            model = parallelize(make(), generated, mode=mode)
            found.append(train(model, tokens, steps))
        differences = installed(model).check(**tokens())
        return found, same, [*map(str, differences)], installed(model).lowered.eager

    expected = train(make(), tokens, steps)
    for (eager, static), same, differences, on_dtensors in run_ranks(check, ranks, timeout=480):
        assert static == eager
        assert static == pytest.approx(expected, abs=6e-5, rel=0)
        assert same
        assert differences == []
        assert on_dtensors == ()


class Centred(nn.Module):
    """Computes the mean of its input, of which a rank has a shard only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.inner(x)
        return self.out(hidden - hidden.mean()).square().sum()


def of_documents(mesh, order="balanced"):
    """What Eager needs to shard LLaMA's sequences, where documents are packed."""
    plan = Plan(mesh).sequence("<in:input_ids>", "cp", order=order)
    plan.sequence("<in:labels>", "cp", order=order, shift="shift_labels")
    plan.sequence(r"model\.rotary_emb.<in:position_ids>", "cp", order=order, positions=True)
    plan.shard(r"model\.layers\.\d+.<in:attention_mask>", R, "cp")
    plan.context(r"model\.layers\.\d+\.self_attn", "cp", order=order)
    return plan.shard("<out:loss>", R, "cp")


CONTEXT = {
    "llama": (models.llama, of_documents, partial(zoo.llama, cp_order="balanced")),
    "mixtral": (
        models.mixtral,
        partial(zoo.mixtral, tp=None, cp="cp", ep="cp"),
        partial(zoo.mixtral, ep="cp"),
    ),
}


def of_sharded_sequences(name):
    """The losses of Eager, of the generated plan, and of the zoo's in static mode."""
    make, eager, static = CONTEXT[name]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ids = torch.randint(0, models.VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(0))
    batch, documents = {"input_ids": ids, "labels": ids}, AttentionMask.of_lengths([5, 9, 3])
    plan, losses = eager(mesh), []
    with attention_mask(documents):
        generated = generate_static(plan, describe_masks(make()), batch)
    for one, mode in (
        (plan, "eager"), (generated, "static"), (static(mesh, tp=None, cp="cp"), "static"),
    ):  # fmt: skip
        model = parallelize(describe_masks(make()), one, mode=mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            with attention_mask(documents):  # a batch
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    with pytest.raises(ValueError, match=r"self_attn.* expected fake=False with context parallel"):
        generate_static(plan, describe_masks(make()), batch, fake=True)
    return losses


@pytest.mark.parametrize("name", ["llama", pytest.param("mixtral", marks=SLOW)])
def test_plans_of_sharded_sequences_train_to_the_bits_of_eager(name):
    for eager, generated, by_hand in run_ranks(of_sharded_sequences, 2, name, timeout=300):
        assert generated == eager
        assert by_hand == pytest.approx(eager, rel=0, abs=1e-6)
        assert eager[0] > eager[-1]


def refused():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    plan = Plan(mesh).shard("<in>", S0, "dp").shard("<out>", [R, R])
    with pytest.raises(
        ValueError, match=r"generate_static: .*cannot run on local tensors"
    ) as error:
        generate_static(plan, Centred(), (torch.randn(4, 8),))
    return str(error.value)


def test_a_model_that_local_tensors_cannot_run_is_refused():
    for message in run_ranks(refused, 2):
        assert "out.run:bias" in message or "what is returned by out" in message
        assert "use mode='eager'" in message
