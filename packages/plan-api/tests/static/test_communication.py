"""A step communicates what a person would write, in Eager and in static mode alike."""

import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import (
    Plan,
    StaticError,
    explain,
    generate_static,
    installed,
    parallelize,
    plan_communication,
    track,
    zoo,
)
from plan_api.static.generation import communication
from plan_api.static.generation.example_step import ExampleStep
from testkit import (
    FLATTENS_TWO_SHARDED_DIMS,
    NO_FLATTENING,
    CommLog,
    fake_mesh,
    models,
    run_ranks,
)

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
RANKS, BATCH, TOKENS, HIDDEN, LAYERS = 8, 8, 16, 64, 2
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
LAYER = r"model\.layers\.\d+"
COLUMNS, ROWS = "(q|k|v|gate|up)_proj", "(o|down)_proj"


def inputs(batch=BATCH, tokens=TOKENS):
    ids = torch.randint(0, models.VOCABULARY, (batch, tokens))
    return {"input_ids": ids, "labels": ids.clone()}


def replicated(mesh, *paths):
    """Entries for tensors that the script and the model create."""
    plan = Plan(mesh)
    for path in ("<in:input_ids>", "<in:labels>", *paths):
        plan.redistribute(path, [R] * len(plan.axes), [R] * len(plan.axes))
    return plan


def small():
    return inputs(batch=4, tokens=8)


def weights_only(mesh):
    plan = replicated(mesh, r"model\.rotary_emb.<in:position_ids>", rf"{LAYER}.<in:attention_mask>")
    plan.shard(rf"{LAYER}\..*\.{COLUMNS}\.weight", S0, "tp")
    return plan.shard(rf"{LAYER}\..*\.{ROWS}\.weight", S1, "tp")


def row_outputs(mesh):
    return weights_only(mesh).redistribute(rf"{LAYER}\..*\.{ROWS}.<out>", P, R, "tp")


def every_linear(mesh):
    """As `_tp_plan` of transformers."""
    plan = weights_only(mesh).shard(rf"{LAYER}\..*\.{COLUMNS}.<in>", R, "tp")
    return plan.shard(rf"{LAYER}\..*\.{ROWS}.<out>", R, "tp")


def sequence_parallel(mesh):
    plan = weights_only(mesh).redistribute(r"model\.layers\.0.<in>", R, S1, "tp")
    plan.redistribute(rf"{LAYER}\..*\.{COLUMNS}.<in>", S1, R, "tp")
    plan.redistribute(rf"{LAYER}\..*\.{ROWS}.<out>", P, S1, "tp")
    return plan.redistribute(r"model\.norm.<out>", S1, R, "tp")


def gpt2(mesh):
    from ragged_shard import InterleavedShard

    block = r"transformer\.h\.\d+"
    plan = replicated(mesh, r"transformer\.wpe.<in>", rf"{block}.<in:attention_mask>")
    plan.shard(rf"{block}\.attn\.c_attn\.weight", InterleavedShard(1, 3), "tp")
    plan.shard(rf"{block}\.attn\.c_attn\.bias", InterleavedShard(0, 3), "tp")
    plan.shard(rf"{block}\.mlp\.c_fc\.weight", S1, "tp")
    plan.shard(rf"{block}\.mlp\.c_fc\.bias", S0, "tp")
    plan.shard(rf"{block}\..*\.c_proj\.weight", S0, "tp")
    return plan.redistribute(rf"{block}\..*\.c_proj.<out>", P, R, "tp")


def mixtral(mesh):
    from ragged_shard import InterleavedShard

    experts = rf"{LAYER}\.mlp\.experts"
    plan = replicated(mesh, r"model\.rotary_emb.<in:position_ids>", rf"{LAYER}.<in:attention_mask>")
    plan.shard(rf"{LAYER}\..*\.(q|k|v)_proj\.weight", S0, "tp")
    plan.shard(rf"{LAYER}\..*\.o_proj\.weight", S1, "tp")
    plan.shard(rf"{experts}\.gate_up_proj", InterleavedShard(1, 2), "tp")
    plan.shard(rf"{experts}\.down_proj", S2, "tp")
    plan.redistribute(rf"{LAYER}\.(self_attn\.o_proj|mlp).<out>", P, R, "tp")
    return plan.local(experts, P, "tp")


make_llama = partial(models.llama, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, **HEADS)
make_gpt2 = partial(models.gpt2, n_embd=HIDDEN, n_head=8)
make_mixtral = partial(models.mixtral, hidden_size=HIDDEN, intermediate_size=128, **HEADS)

HIDDEN_STATES = 4 * BATCH * TOKENS * HIDDEN


# What a person would write. Without sequence parallelism, outputs of attention and MLP are reduced
# in forward, and the gradients of their inputs in backward (Megatron-LM).
def reduced(layers):
    return Counter({("all_reduce", HIDDEN_STATES): 4 * layers})


# With it these are gathers and reduce-scatters; the sequence is also gathered before the head, and
# its gradient after the embedding, and the gradients of all norms are reduced in one bucket,
# whose flags, one more than norms, are padded to a multiple of four.
def scattered(layers):
    norms = 2 * layers + 1
    flags = math.ceil((norms + 1) / 4) * 4
    return Counter(
        {
            ("all_gather", HIDDEN_STATES): 4 * layers + 2,
            ("reduce_scatter", HIDDEN_STATES): 4 * layers,
            ("all_reduce", 4 * (norms * HIDDEN + flags)): 1,
        }
    )


# The experts' input and the weights of two experts for each token have gradients of their own, as
# the router takes the input too.
def of_experts(layers):
    return reduced(layers) + Counter({("all_reduce", 4 * BATCH * TOKENS * 2): layers})


CASES = {
    "llama, weights only": (make_llama, weights_only, reduced),
    "llama, outputs of rows": (make_llama, row_outputs, reduced),
    "llama, every Linear": (make_llama, every_linear, reduced),
    "llama, sequence parallel": (make_llama, sequence_parallel, scattered),
    "gpt2": (make_gpt2, gpt2, reduced),
    "mixtral": (make_mixtral, mixtral, of_experts),
}
SLOW = ("llama, outputs of rows", "llama, every Linear", "gpt2")


@pytest.fixture
def mesh():
    with fake_mesh((RANKS,), ("tp",)) as mesh:
        yield mesh


def collectives(model, batch):
    """Counts the collectives of a second step by name and bytes."""

    def loss():
        return model(*batch) if isinstance(batch, tuple) else model(**batch).loss

    loss().backward()
    model.zero_grad()
    with track(model) as record:
        loss().backward()
    return Counter((one.name, one.bytes) for one in record.collectives)


@pytest.mark.parametrize(
    "layers", [pytest.param(1, id="one layer"), pytest.param(LAYERS, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_both_modes_communicate_what_a_person_would_write(mesh, name, layers):
    make, plan_of, communicated = CASES[name]
    size = "n_layer" if make is make_gpt2 else "num_hidden_layers"
    make, expected = partial(make, **{size: layers}), communicated(layers)
    batch, written = inputs(), plan_of(mesh)
    planned = plan_communication(written, make(), batch, fake=True)
    assert collectives(parallelize(make(), planned, strict=True), batch) == expected
    static = generate_static(written, make(), batch)
    assert collectives(parallelize(make(), static, mode="static", guard_steps=0), batch) == expected
    assert collectives(parallelize(make(), static), batch) == expected


def test_what_some_users_of_a_tensor_reduce_already_is_merged_with_what_others_ask_for(mesh):
    make, written = partial(make_llama, num_hidden_layers=1), weights_only(mesh)
    for name in ("q", "k"):
        place = rf"{LAYER}\.self_attn\.{name}_proj.<in>"
        written.redistribute(place, R, R, "tp", grad_src=P, grad_dst=R)
    planned = plan_communication(written, make(), inputs(), fake=True)
    assert collectives(parallelize(make(), planned, strict=True), inputs()) == reduced(1)


def test_eager_and_static_communicate_more_as_written(mesh):
    batch, written = inputs(), row_outputs(mesh)
    eager = collectives(parallelize(make_llama(), written), batch)
    assert {name for name, _ in eager} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert eager.total() > 2 * reduced(LAYERS).total()
    static = generate_static(written, make_llama(), batch, communication="as written")
    found = collectives(parallelize(make_llama(), static, mode="static", guard_steps=0), batch)
    assert found == Counter({("all_reduce", HIDDEN_STATES): (2 + 5) * LAYERS})


@pytest.mark.parametrize(
    ("make", "plan_of"),
    [
        pytest.param(make_llama, zoo.llama, marks=pytest.mark.slow),
        (make_llama, partial(zoo.llama, sp=True, loss_parallel=True)),
        (make_gpt2, zoo.gpt2),
        pytest.param(make_gpt2, partial(zoo.gpt2, sp=True), marks=pytest.mark.slow),
        (make_mixtral, zoo.mixtral),
    ],
)
def test_a_plan_that_has_these_redistributions_is_unchanged(mesh, make, plan_of):
    plan = plan_of(mesh)
    assert plan_communication(plan, make(), inputs(), fake=True) is plan


def test_a_planned_plan_is_unchanged_and_is_the_same_on_meta(mesh):
    plan = plan_communication(sequence_parallel(mesh), make_llama(), inputs())
    assert plan_communication(plan, make_llama(), inputs()) is plan
    with torch.device("meta"):
        on_meta = make_llama()
    assert plan_communication(sequence_parallel(mesh), on_meta, inputs()).entries == plan.entries


def test_explain_shows_what_is_added_with_the_lines_that_ask_for_it(mesh):
    written = weights_only(mesh)
    model = make_llama()
    columns, rows = written.entries[-2].line, written.entries[-1].line
    planned = plan_communication(written, model, inputs())
    assert planned.entries[: len(written.entries)] == written.entries
    found = {(row.site, row.tensor): row for row in explain(planned, model).rows}
    for path, line in (("self_attn", columns), ("mlp", columns)):
        row = found[f"model.layers.1.{path}", "<in>:0"]
        assert (row.before, row.after, row.gradient) == ("tp=R", "tp=R", "tp=P->R")
        assert row.line == f"added for {line}"
    for path in ("self_attn.o_proj", "mlp.down_proj"):
        row = found[f"model.layers.1.{path}", "<out>:0"]
        assert (row.before, row.after, row.line) == ("tp=P", "tp=R", f"added for {rows}")


def test_gathers_of_several_modules_are_replaced_by_one(mesh):
    written = sequence_parallel(mesh)
    planned = plan_communication(written, make_llama(), inputs())
    (removed,) = [entry for entry in written.entries if entry not in planned.entries]
    assert COLUMNS in removed.path.text
    added = [entry for entry in planned.entries if entry not in written.entries]
    assert [entry.path.pattern for entry in added] == [rf"{LAYER}\.self_attn", rf"{LAYER}\.mlp"]
    assert all(entry.src == (S1,) and entry.dst == (R,) for entry in added)


class Columns(nn.Module):
    """Two Linears."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.a(x), self.b(x)


class ParallelBlocks(nn.Module):
    """Two modules take what a norm returns; a replicated router, or a sum, may take it too."""

    def __init__(self, also=None):
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(16), Columns(), Columns()
        self.also = also
        if also == "router":
            self.router = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        x = self.norm(x)
        a, b = self.left(x)
        c, d = self.right(x)
        out = a * b + c * d
        if self.also == "sum":
            return (out + x).sum()
        return (out.sum() + self.router(x).sum()) if self.also == "router" else out.sum()


def added_places(mesh, also):
    plan = Plan(mesh).redistribute("<in>", R, R).shard(r"(left|right)\.(a|b)\.weight", S0)
    model = ParallelBlocks(also)
    planned = plan_communication(plan, model, (torch.randn(4, 16),))
    return [entry.path.text for entry in planned.entries[len(plan.entries) :]]


def test_a_gradient_is_reduced_at_the_output_that_all_users_take(mesh):
    assert added_places(mesh, None) == ["norm.<out:0>"]


def test_a_gradient_is_reduced_at_an_output_in_static_mode_as_well(mesh):
    """Once, though each of the four Linears below makes it Partial."""
    plan = Plan(mesh).redistribute("<in>", R, R).shard(r"(left|right)\.(a|b)\.weight", S0)
    plan.shard("<out>", R)
    inputs = (torch.randn(4, 16),)
    static = generate_static(plan, ParallelBlocks(), inputs, fake=True)
    planned = plan_communication(plan, ParallelBlocks(), inputs)
    for generated, mode in ((planned, "eager"), (static, "eager"), (static, "static")):
        model = parallelize(
            ParallelBlocks(), generated, mode=mode, guard_steps=0 if mode == "static" else None
        )
        reduced = {("all_reduce", 4): 1, ("all_reduce", 4 * 4 * 16): 1}
        assert collectives(model, inputs) == reduced, mode


def test_parallelize_plans_the_communication_of_example_inputs(mesh):
    plan = Plan(mesh).redistribute("<in>", R, R).shard(r"(left|right)\.(a|b)\.weight", S0)
    plan.shard("<out>", R)
    inputs = (torch.randn(4, 16),)
    assert installed(parallelize(ParallelBlocks(), plan)).plan is plan
    planned = parallelize(ParallelBlocks(), plan, example_inputs=inputs)
    added = installed(planned).plan.entries[len(plan.entries) :]
    assert [entry.path.text for entry in added] == ["norm.<out:0>"]
    assert added[0].line == f"added for {plan.entries[1].line}"
    static = generate_static(plan, ParallelBlocks(), inputs, fake=True)
    model = parallelize(
        ParallelBlocks(), static, mode="static", guard_steps=0, example_inputs=inputs
    )
    assert installed(model).plan is static  # it has these entries
    assert collectives(model, inputs) == collectives(planned, inputs)


@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"ep": "tp", "sp": True}]
)
def test_example_inputs_of_experts_are_planned_without_values(mesh, mode, options):
    plan = zoo.mixtral(mesh, **options)
    model = make_mixtral(num_local_experts=8)
    parallelize(model, plan, mode=mode, example_inputs=inputs())
    assert installed(model).plan is plan  # which the zoo has written in full


def test_an_error_in_the_step_of_example_inputs_names_the_module_and_the_remedy(mesh):
    model, message = make_llama(), r"(?s)mixed torch.Tensor and DTensor.*pass use_cache=False"
    with pytest.raises(RuntimeError, match=message):
        parallelize(model, zoo.llama(mesh), example_inputs=inputs() | {"use_cache": True})
    assert not any(isinstance(param, DTensor) for param in model.parameters())


def test_example_inputs_that_do_not_fit_are_refused_before_the_model_is_changed(mesh):
    model = ParallelBlocks()
    with pytest.raises(ValueError, match="expected example_inputs as a tuple"):
        parallelize(model, Plan(mesh), example_inputs=torch.randn(4, 16))
    assert not any(isinstance(param, DTensor) for param in model.parameters())


class Resized(nn.Module):
    """Its code names a global size, which is a local one in static mode."""

    def __init__(self, *sizes):
        super().__init__()
        self.up, self.sizes = nn.Linear(16, 8, bias=False), sizes

    def forward(self, x):
        return self.up(x).view(*self.sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 8), "(?s)the model fails in its own code, .* its code may name global sizes"),
        ((-1, 8), r"is returned by the model: expected \(8, 1\) on this rank as in Eager"),
    ],
    ids=["that local tensors do not have", "that local tensors have otherwise"],
)
def test_what_static_mode_cannot_run_is_refused_before_the_model_is_changed(mesh, sizes, message):
    plan = Plan(mesh).redistribute("<in>", R, R).shard(r"up\.weight", S0)
    plan.annotate("<out>", S1, "tp")
    model, inputs = Resized(*sizes), (torch.randn(8, 16),)
    with pytest.raises(StaticError, match=message):
        parallelize(model, plan, mode="static", example_inputs=inputs)
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    plan.annotate("<op:view>", S1, "tp")
    parallelize(model, plan, mode="static", example_inputs=inputs)(*inputs)


class NeedsTwo(nn.Module):
    """Its code needs two features, and of three a rank has one."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        y = self.up(x)
        if y.shape[-1] == 1:
            raise RuntimeError("one feature")
        return y


@pytest.mark.ranks
def test_what_fails_on_one_rank_is_refused_on_all():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan(mesh).redistribute("<in>", R, R).shard(r"up\.weight", S0)
        plan.redistribute("<out>", S1, R, grad_src=R, grad_dst=S1)
        model = NeedsTwo()
        try:
            parallelize(model, plan, mode="static", example_inputs=(torch.ones(2, 4),))
        except StaticError as error:
            return type(model.up.weight) is nn.Parameter, "one feature" in str(error)

    assert run_ranks(check, 2) == [(True, False), (True, True)]


@pytest.mark.parametrize("also", ["sum", "router"])
def test_a_tensor_with_other_uses_is_reduced_at_the_modules_around_its_users(mesh, also):
    """As its gradient is replicated there, and would be summed once a rank."""
    assert added_places(mesh, also) == ["left.<in:0>", "right.<in:0>"]


def test_one_hook_reduces_an_output_and_the_gradient_that_its_users_share(mesh):
    model = ParallelBlocks()
    model.norm = nn.Linear(16, 16, bias=False)  # by rows, before those by columns
    plan = Plan(mesh).redistribute("<in>", R, S1).shard(r"(left|right)\.(a|b)\.weight", S0)
    plan.shard(r"norm\.weight", S1).redistribute("norm.<out>", P, R)
    planned = plan_communication(plan, model, (torch.randn(4, 16),))
    (added,) = planned.entries[3:]
    assert added.path.text == "norm.<out:0>"
    assert (added.src, added.dst, added.grad_src, added.grad_dst) == ((P,), (R,), (P,), (R,))


def test_entries_of_fully_shard_stay_and_do_not_apply_to_the_steps(mesh):
    plan = Plan(mesh).redistribute("<in>", R, R).shard(r"left\.(a|b)\.weight", S0)
    found = []
    for written in (plan, plan | Plan(mesh).fully_shard("right", "tp")):
        with CommLog() as log:
            planned = plan_communication(
                written, ParallelBlocks(), (torch.randn(4, 16),), fake=False
            )
        found.append([(call.op, call.input_bytes) for call in log.calls])
        added = [entry for entry in planned.entries if entry not in written.entries]
        assert [entry.path.text for entry in added] == ["left.<in:0>"]
        assert all(entry in planned.entries for entry in written.entries)
    assert found[0] == found[1]
    assert found[0]


def test_overrides_of_the_plan_are_logged_where_it_is_applied_only(mesh, caplog):
    plan = Plan(mesh).redistribute("<in>", R, R).shard(r"(left|right)\.(a|b)\.weight", S1)
    plan.shard(r"(left|right)\.(a|b)\.weight", S0).shard("<out>", R)
    inputs = (torch.randn(4, 16),)
    plan_communication(plan, ParallelBlocks(), inputs)
    static = generate_static(plan, ParallelBlocks(), inputs)
    assert caplog.messages == []
    parallelize(ParallelBlocks(), static)
    (message,) = caplog.messages
    assert "is overridden by" in message


class ManyRows(nn.Module):
    """Linears of different names, each after the other."""

    def __init__(self, number):
        super().__init__()
        for one in range(number):
            self.add_module(chr(ord("a") + one), nn.Linear(16, 16, bias=False))

    def forward(self, x):
        for linear in self.children():
            x = x * torch.relu(linear(x))
        return x.sum()


def test_steps_that_do_not_suffice_are_logged_and_a_further_call_continues(
    mesh, caplog, monkeypatch
):
    """Each step of Eager finds one output that is Partial, as those behind it depend on it."""
    monkeypatch.setattr(communication, "_MOST_STEPS", 3)
    plan = Plan(mesh).redistribute("<in>", R, R).shard(r"[a-z]\.weight", S1)
    inputs = (torch.randn(4, 16),)
    planned = plan_communication(plan, ManyRows(5), inputs)
    (message,) = caplog.messages
    assert "call it again" in message
    planned = plan_communication(planned, ManyRows(5), inputs)
    assert caplog.messages == [message]
    assert plan_communication(planned, ManyRows(5), inputs) is planned
    outputs = {entry.path.text for entry in planned.entries if "<out" in entry.path.text}
    assert len(outputs) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layers_that_are_alike_are_planned_at_once(mesh, monkeypatch, name):
    """A reduced gradient places that of the layer before it, so a step shows the last one only."""
    make, plan_of, _ = CASES[name]
    size = "n_layer" if make is make_gpt2 else "num_hidden_layers"
    trace, steps, paths = ExampleStep.trace, Counter(), {}
    for layers in (2, 3):

        def counted(step, plan, layers=layers):
            steps[layers] += 1
            return trace(step, plan)

        monkeypatch.setattr(ExampleStep, "trace", counted)
        model = make(**{size: layers})
        planned = plan_communication(plan_of(mesh), model, inputs(), fake=True)
        paths[layers] = [entry.path.text for entry in planned.entries]
    assert steps[3] == steps[2] > 1
    assert paths[3] == paths[2]


def test_layers_in_which_the_plan_writes_something_else_are_planned_for_themselves(mesh):
    """The first one's attention gets a sharded sequence, which it gathers."""
    plan = weights_only(mesh)
    attention = r"model\.layers\.0\.self_attn"
    plan.redistribute(rf"{attention}.<in:hidden_states>", S1, R, "tp")
    plan.redistribute(r"model\.layers\.0\.input_layernorm.<in>", R, S1, "tp")
    make = partial(make_llama, num_hidden_layers=3)
    planned = plan_communication(plan, make(), inputs())
    expected = Counter(
        {
            ("all_reduce", HIDDEN_STATES): 4 * 3 - 1,
            ("all_gather", HIDDEN_STATES): 2,  # of the input, and of the gradient of the norm
            ("reduce_scatter", HIDDEN_STATES): 1,
        }
    )
    found = collectives(parallelize(make(), planned, strict=True), inputs())
    assert {key: n for key, n in found.items() if key[1] == HIDDEN_STATES} == expected


def test_other_entries_of_the_same_module_stay(mesh):
    """Such as that of the tensors that it creates."""
    plan = Plan(mesh).redistribute("<in>", R, R).shard(r"left\.(a|b)\.weight", S0)
    plan.factory("left", R, "tp").shard("left.<in>", R, "tp")
    planned = plan_communication(plan, ParallelBlocks(), (torch.randn(4, 16),))
    assert planned.entries[:3] == plan.entries[:3]
    (added,) = planned.entries[3:]
    assert added.path.text == "left.<in:0>"
    assert added.line == f"added for {plan.entries[1].line}"


def test_what_has_no_meaning_is_refused(mesh):
    plan = weights_only(mesh)
    with pytest.raises(ValueError, match="plan_communication: expected example_inputs as a"):
        plan_communication(plan, make_llama(), torch.zeros(2))
    with pytest.raises(ValueError, match="plan_communication: forward of Columns does not take"):
        plan_communication(Plan(mesh), Columns(), {"pixels": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"communication='least' must be 'planned' or"):
        generate_static(plan, make_llama(), inputs(), communication="least")


def tied_qwen():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, head_dim=8,
        use_cache=False, attn_implementation="eager", attention_dropout=0.1, max_window_layers=0,
        tie_word_embeddings=True, num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).train()


llama = partial(models.llama, num_key_value_heads=4, attention_dropout=0.1)
TRAINED = {
    "llama, one layer": (partial(llama, num_hidden_layers=1), weights_only),
    "llama": (llama, weights_only),
    "qwen3, tied": (tied_qwen, row_outputs),
}


def trained(name, steps):
    """Trains a model in Eager and in static mode; returns the losses and full parameters."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    make, plan_of = TRAINED[name]
    planned = plan_communication(plan_of(mesh), make(), small())
    static = generate_static(plan_of(mesh), make(), small())
    found = []
    for plan, mode in ((planned, "eager"), (static, "static")):
        model = parallelize(make(), plan, mode=mode)
        losses = models.train(model, lambda model: model(**small()).loss, steps=steps)
        found.append((losses, [param.detach().full_tensor() for param in model.parameters()]))
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "llama, one layer"))
        for name in TRAINED
    ],
)
def test_both_modes_train_to_the_same_bits(name):
    """Eight steps of AdamW with dropout."""
    alone = TRAINED[name][0]()
    one_device = models.train(alone, lambda model: model(**small()).loss, steps=8)
    for eager, static in run_ranks(trained, 2, name, 8, timeout=580):
        assert eager[0] == static[0]
        assert all(map(torch.equal, eager[1], static[1]))
        assert eager[0] == pytest.approx(one_device, abs=1e-4)
