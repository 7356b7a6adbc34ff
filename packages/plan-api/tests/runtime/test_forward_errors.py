"""What errors in a module's forward say, and that the entries that they name mend them."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import ragged_shard
from plan_api import Plan, installed, parallelize, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
# One sequence: torch 2.11's DTensor flattens no batch of several with sharded heads, as `@` does.
IDS = torch.arange(12).view(1, 12)
IN_PLAN = {"Replicate": Replicate, "Shard": Shard, "Partial": Partial}


def product(a, b):
    """Multiplies matrices per batch and head, which `@` flattens: torch 2.11's DTensor does not."""
    return (a[..., None] * b[:, :, None]).sum(-2)


class Attention(nn.Module):
    """Heads of 4 features, and a bias for positions that it makes itself if asked."""

    def __init__(self, heads, *, positions=False):
        super().__init__()
        self.heads, self.positions = heads, positions
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x, mask=None):
        batch, length, size = x.shape
        q, k, v = (
            one(x).view(batch, length, self.heads, size // self.heads).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        scores = product(q, k.transpose(-1, -2))
        if self.positions:
            scores = scores + torch.arange(length)[None, None, None]
        if mask is not None:
            scores = scores + mask[:, None]
        return self.o(product(scores.softmax(-1), v).transpose(1, 2).reshape(batch, length, size))


class Layers(nn.Module):
    def __init__(self, heads=2, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(heads, **options) for _ in range(2))

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


def plan_of(mesh):
    return (
        Plan(mesh)
        .shard(r"layers\.\d+\.(q|k|v)\.(weight|bias)", S0, "tp")
        .shard(r"layers\.\d+\.o\.weight", S1, "tp")
        .shard("<in>", S0, "dp")
    )


def inputs():
    torch.manual_seed(1)
    return torch.randn(4, 5, 12), torch.randn(4, 5, 5)


def failure(model, plan, *args, mode="eager", **kwargs):
    """What the first call says; the class is torch's own, and the object has one sentence."""
    parallelize(model, plan, mode=mode, **({"guard_steps": 0} if mode == "static" else {}))
    with pytest.raises(RuntimeError) as raised:
        model(*args, **kwargs)
    message = str(raised.value)
    assert type(raised.value) is RuntimeError
    assert message.count("\nin ") == 1
    return message


def pasted(plan, message):
    """The plan with the entries that an error names."""
    lines = re.findall(r"^plan\.\w+\(.*$", message, re.MULTILINE)
    assert lines, message
    for line in lines:
        exec(line, {"plan": plan, **IN_PLAN})
    return lines


def mended(make, plan, call, most=6):
    """What a model returns when the plan has all entries that its errors have named."""
    added = []
    for _ in range(most):
        try:
            result = call(parallelize(make(), plan))
        except RuntimeError as error:
            added += pasted(plan, str(error))
        else:
            return result.full_tensor(), added
    raise AssertionError(added)


def test_a_plain_input_is_named_with_module_expression_and_entry(mesh):
    x, mask = inputs()
    message = failure(Layers(), plan_of(mesh), x, mask)
    assert "in layers.0 (Attention), at test_forward_errors.py:" in message
    assert "`scores + mask[:, None]`" in message
    assert "mask is a torch.Tensor of (4, 5, 5)" in message
    assert "scores is a DTensor of (4, 2, 5, 5), placed S(0), S(1)" in message
    assert message.endswith('plan.shard("<in:mask>", [Shard(0), Replicate()])')  # as x is


def test_a_plain_input_is_named_at_the_outermost_module(mesh):
    plan = Plan(mesh).shard(r"layers\.\d+\.(q|k|v)\.weight", S0, "tp")
    message = failure(Layers(), plan, inputs()[0])
    assert "in layers.0.q (Linear)" in message
    assert "the plan says of layers.0.q: entry 0 of the plan (test_forward_errors.py:" in message
    assert "shard weight:0 tp=S(0)" in message
    assert 'plan.shard("<in:x>", [Replicate(), Replicate()])' in message


def test_a_layer_that_creates_tensors_is_named_with_its_siblings(mesh):
    message = failure(Layers(positions=True), plan_of(mesh), inputs()[0])
    assert r'plan.factory(r"layers\.\d+", [Replicate(), Replicate()])' in message
    assert "plan.shard(" not in message


def test_siblings_of_another_class_are_left_out(mesh):
    class Shifted(nn.Module):
        def forward(self, x):
            return x + torch.arange(4)

    model = nn.Sequential(nn.Linear(4, 4), Shifted())
    message = failure(model, Plan(mesh).shard("<in>", S0, "dp"), torch.ones(4, 4))
    assert 'plan.factory("1", ' in message


def test_an_unregistered_tensor_has_the_remedy_to_register_it(mesh):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(4)

        def forward(self, x):
            return x * self.scale

    message = failure(nn.Sequential(Scaled()), Plan(mesh).shard("<in>", S0, "dp"), torch.ones(4, 4))
    assert "in 0 (Scaled)" in message
    assert "register_buffer('scale', ...)" in message
    assert "plan." not in message.replace("no entry of the plan", "")


def test_undivided_heads_name_the_weights_and_the_entry_that_gathers(mesh):
    message = failure(Layers(heads=3), plan_of(mesh), inputs()[0])
    assert "in layers.0 (Attention)" in message
    assert "its operand is a DTensor of (4, 5, 12), placed S(0), S(2), by entry 0 of" in message
    assert "shard weight:0 tp=S(0)" in message
    assert [line for line in message.splitlines() if line.startswith("plan.")] == [
        rf'plan.shard(r"layers\.\d+\.{one}.<out>", Replicate(), "tp")' for one in "qkv"
    ]


@pytest.mark.ranks
def test_suggested_entries_make_models_match_one_device():
    def check():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        x, mask = inputs()
        cases = {
            "input": (Layers, plan_of(mesh), (x, mask)),
            "no input": (Layers, Plan(mesh).shard(r".*\.q\.weight", S0, "tp"), (x,)),
            "heads": (lambda: Layers(heads=3), plan_of(mesh), (x,)),
            "positions": (lambda: Layers(positions=True), plan_of(mesh), (x,)),
        }
        found = {}
        for name, (make, plan, args) in cases.items():
            result, added = mended(make, plan, lambda model, args=args: model(*args))
            found[name] = torch.allclose(result, make()(*args), atol=1e-5), len(added)
        return found

    for found in run_ranks(check, 2):
        assert found == {
            "input": (True, 1), "no input": (True, 1), "heads": (True, 3), "positions": (True, 1),
        }  # fmt: skip


def of_attention(mesh):
    """A plan of LLaMA as one begins to write it."""
    layer = r"model\.layers\.\d+\.self_attn"
    return (
        Plan(mesh)
        .shard(rf"{layer}\.[qkv]_proj\.weight", S0, "tp")
        .shard(rf"{layer}\.o_proj\.weight", S1, "tp")
    )


@pytest.mark.ranks
def test_suggested_entries_complete_a_plan_of_llama():
    def check():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        with torch.no_grad():
            result, added = mended(
                models.llama, of_attention(mesh), lambda model: model(input_ids=IDS).logits
            )
            return torch.allclose(result, models.llama()(input_ids=IDS).logits, atol=1e-5), added

    for same, added in run_ranks(check, 2):
        assert same
        assert [re.search("<.*>", line)[0] for line in added] == [
            "<in:input_ids>", "<in:position_ids>", "<in:attention_mask>",
        ]  # fmt: skip


def test_the_model_is_named_where_ragged_shard_has_patched_dispatch(mesh):
    was_installed = ragged_shard.is_installed()
    ragged_shard.install()
    try:
        message = failure(models.llama(), zoo.llama(mesh), input_ids=IDS, use_cache=True)
    finally:
        if not was_installed:
            ragged_shard.uninstall()
    assert "in model.layers.0.self_attn (LlamaAttention), at cache_utils.py:" in message


def test_a_key_value_cache_is_named_with_the_remedy(mesh):
    message = failure(models.llama(), zoo.llama(mesh), input_ids=IDS, use_cache=True)
    assert "in model.layers.0.self_attn (LlamaAttention), at cache_utils.py:" in message
    assert "self.keys is a torch.Tensor of a DynamicLayer" in message
    assert "pass use_cache=False" in message
    parallelize(models.llama(), zoo.llama(mesh))(input_ids=IDS, use_cache=False)


@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
def test_generate_suggests_static_mode_which_matches_one_device():
    def check():
        # Two sequences: tensors of one element per sequence would be scalars to DTensor.
        ids = torch.arange(12).view(2, 6)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def tokens(model, **options):
            given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0} | options
            return model.eval().generate(ids, max_new_tokens=4, do_sample=False, **given).tolist()

        model = parallelize(models.llama(), zoo.llama(mesh))
        with pytest.raises(RuntimeError, match="mixed") as raised:
            tokens(model, use_cache=False)
        installed(model).remove()
        static = parallelize(models.llama(), zoo.llama(mesh), mode="static")
        expected = tokens(models.llama())
        same = tokens(static) == expected, tokens(static, use_cache=False) == expected
        return str(raised.value), same, "generate" in vars(model)

    for message, same, patched in run_ranks(check, 2):
        assert "in generate(), outside of modules, at utils.py:" in message
        assert "mode='static'" in message
        assert same == (True, True)
        assert not patched


def test_static_mode_names_the_module_with_global_sizes(mesh):
    model, x = Layers(), inputs()[0]
    plan = (
        Plan(mesh)
        .shard(r"layers\.\d+\.(q|k|v)\.(weight|bias)", S0, "tp")
        .redistribute(r"layers\.\d+\.o.<in>", Shard(2), R, "tp", grad_src=R)
    )
    message = failure(model, plan, x, mode="static")
    assert "in layers.0 (Attention)" in message
    assert "generate_static(plan, model, example_inputs)" in message


def test_an_error_that_is_handled_meanwhile_is_not_annotated(mesh):
    x = inputs()[0]
    model = parallelize(Layers(), plan_of(mesh))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as raised:
        model.layers[0](x)  # a call of a submodule alone, of which nothing is said
    handled = raised.value
    before = str(handled)
    assert "in layers" not in before
    try:
        raise handled
    except RuntimeError:
        assert isinstance(model(x), DTensor)
    assert str(handled) == before
    assert not hasattr(handled, "__notes__")


def test_an_error_of_a_custom_class_gets_a_note(mesh):
    class OwnError(RuntimeError):
        pass

    class Raises(nn.Module):
        def forward(self, x):
            raise OwnError("as it is")

    model = parallelize(nn.Sequential(Raises()), Plan(mesh).shard("<in>", S0, "dp"))
    with pytest.raises(OwnError, match="as it is") as raised:
        model(torch.ones(4, 4))
    assert str(raised.value) == "as it is"
    (note,) = raised.value.__notes__
    assert note.startswith("in 0 (Raises), at test_forward_errors.py:")


def test_compiled_models_have_no_graph_break(mesh):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = parallelize(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Plan(mesh))
    assert len(model._forward_hooks) == 1
    x = DTensor.from_local(torch.ones(4, 4), mesh, [R, R])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x).to_local(), model(x).to_local())
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["graph_break"] == {}
    torch._dynamo.reset()


def test_removed_hooks_annotate_nothing(mesh):
    model = parallelize(Layers(), plan_of(mesh))
    installed(model).remove()
    with pytest.raises(RuntimeError, match="mixed") as raised:
        model(inputs()[0])
    assert "in layers" not in str(raised.value)
