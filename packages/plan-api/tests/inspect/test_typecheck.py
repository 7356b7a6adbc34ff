"""Plans are checked by the types of spmd_types, without a number."""

import importlib.metadata
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api import Phase, Plan, StaticError, generate_static, typecheck, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, fake_mesh, models, run_ranks
from testkit.models import TwoLinears

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
DETAILS = Path(__file__).parents[4] / "docs" / "packages" / "plan-api" / "details.md"
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_dropout": 0.1}


@pytest.fixture
def mesh():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        yield mesh


def tokens():
    ids = torch.randint(0, models.VOCABULARY, (4, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def images(size=16):
    return {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.randint(0, 10, (4,))}


llama, mixtral = partial(models.llama, **HEADS), partial(models.mixtral, **HEADS)
# By name: the model, the plan, and whether it runs on FakeTensors.
ZOO = {
    "llama": (llama, partial(zoo.llama, dp="dp"), True),
    "llama, sequence parallel": (llama, partial(zoo.llama, dp="dp", sp=True), True),
    "llama, loss parallel": (llama, partial(zoo.llama, dp="dp", loss_parallel=True), True),
    "llama, sequence and loss parallel": (
        llama, partial(zoo.llama, dp="dp", sp=True, loss_parallel=True), True,
    ),
    "llama, data parallel": (llama, partial(zoo.llama, tp=None, dp=("dp", "tp")), True),
    "llama, fully_shard": (
        llama, lambda mesh: zoo.llama(mesh, dp="dp").fully_shard("", "dp"), True,
    ),
    "llama, sdpa": (
        partial(models.llama, attn_implementation="sdpa", attention_dropout=0.1),
        partial(zoo.llama, dp="dp"), True,
    ),
    "qwen3": (partial(models.qwen3, **HEADS), partial(zoo.qwen3, dp="dp"), True),
    "gemma3": (partial(models.gemma3, **HEADS), partial(zoo.gemma3, dp="dp"), True),
    "gpt2": (models.gpt2, partial(zoo.gpt2, dp="dp"), True),
    "gpt2, sequence parallel": (models.gpt2, partial(zoo.gpt2, dp="dp", sp=True), True),
    "gpt2, loss parallel": (models.gpt2, partial(zoo.gpt2, dp="dp", loss_parallel=True), True),
    "mixtral": (mixtral, partial(zoo.mixtral, dp="dp"), False),
    "mixtral, sequence parallel": (mixtral, partial(zoo.mixtral, dp="dp", sp=True), False),
    "mixtral, loss parallel": (mixtral, partial(zoo.mixtral, dp="dp", loss_parallel=True), False),
    "mixtral, experts along tp": (mixtral, partial(zoo.mixtral, dp="dp", ep="tp"), False),
    "qwen3_moe": (partial(models.qwen3_moe, **HEADS), partial(zoo.qwen3_moe, dp="dp"), False),
    "gpt_oss": (partial(models.gpt_oss, **HEADS), partial(zoo.gpt_oss, dp="dp"), False),
    "gpt_oss, experts along tp": (
        partial(models.gpt_oss, **HEADS), partial(zoo.gpt_oss, dp="dp", ep="tp"), False,
    ),
    "deepseek_v3": (
        partial(models.deepseek_v3, attention_dropout=0.1),
        partial(zoo.deepseek_v3, dp="dp", dense=1), False,
    ),
    "vit": (models.vit, partial(zoo.vit, dp="dp"), True),
    "vit, sequence parallel": (
        partial(models.vit, image_size=12), partial(zoo.vit, dp="dp", sp=True), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_the_plans_of_the_zoo_have_the_right_types(mesh, name):
    make, plan, fake = ZOO[name]
    model = make()
    batch = images(getattr(model.config, "image_size", 0)) if "vit" in name else tokens()
    typecheck(plan(mesh), model, batch, fake=fake)


@pytest.mark.ranks
def test_dispatched_experts_have_the_right_types():
    def check():
        data = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        tensor = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        batch = tokens()
        typecheck(zoo.mixtral(data, tp=None, dp="dp", ep="dp"), mixtral(), batch, fake=False)
        typecheck(zoo.mixtral(tensor, dp="dp", sp=True, ep="tp"), mixtral(), batch, fake=False)

    run_ranks(check, 2)


@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
@pytest.mark.slow
def test_a_generated_plan_has_the_right_types():
    with fake_mesh((2,), ("tp",)) as mesh:
        layer, plan = r"model\.layers\.\d+", Plan(mesh)
        for path in ("<in:input_ids>", "<in:labels>", r"model\.rotary_emb.<in:position_ids>"):
            plan.redistribute(path, R, R)
        plan.redistribute(rf"{layer}.<in:attention_mask>", R, R)
        plan.shard(rf"{layer}\..*\.(q|k|v|gate|up)_proj\.weight", S0)
        plan.shard(rf"{layer}\..*\.(o|down)_proj\.weight", S1)
        model = models.llama(num_hidden_layers=1)
        typecheck(generate_static(plan, model, tokens(), fake=True), model, tokens())


def test_a_model_on_meta_is_checked(mesh):
    with torch.device("meta"):
        model = models.llama(num_hidden_layers=1)
    batch = {name: one.to("meta") for name, one in tokens().items()}
    typecheck(zoo.llama(mesh, dp="dp"), model, batch)


def two_linears(mesh):
    plan = Plan(mesh).redistribute("<in>", [R, R], [S0, R]).annotate(r".*\.grad", P, "dp")
    plan.shard(r"up\.(weight|bias)", S0, "tp").shard(r"down\.weight", S1, "tp")
    plan.redistribute(r"down\.bias", R, P, "tp")
    plan.redistribute("up.<in>", R, R, "tp", grad_src=P, grad_dst=R)
    return plan.redistribute("down.<out>", P, R, "tp")


class Regression(TwoLinears):
    """Returns the loss, by a function of torch, whose mean is over all rows."""

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        return nn.functional.mse_loss(y, torch.zeros_like(y), reduction=self.reduction)

    reduction = "mean"


def regression(mesh):
    plan = two_linears(mesh).annotate("<op:mse_loss>", S0, "dp")
    return plan.redistribute("<out>", P, R, "dp")


def refusal(plan, model, batch):
    with pytest.raises(StaticError) as error:
        typecheck(plan, model, batch)
    return error.value


def test_refusals_name_site_entry_and_remedy(mesh):
    batch = (torch.randn(4, 4),)
    typecheck(regression(mesh), Regression(), batch)

    error = refusal(regression(mesh).redistribute("down.<out>", R, R, "tp"), Regression(), batch)
    assert error.site == "down"
    assert re.search(r"down\.forward:<out>:0: .*'tp'.*got type V", str(error))
    assert re.search(r"redistribute\(path, Partial\(\), Replicate\(\), 'tp'\)", str(error))
    assert "test_typecheck.py" in str(error)

    plan = regression(mesh).annotate(r"up\.bias\.grad", R, "dp")
    error = refusal(plan, Regression(), batch)
    assert error.site == "up"
    assert "up.bias, dp=I, tp=V" in str(error)
    assert "annotate('up.bias.grad', Partial(), 'dp')" in str(error)

    plan = regression(mesh).redistribute("down.<out>", P, R, "tp", grad_src=P, grad_dst=R)
    error = refusal(plan, Regression(), batch)
    assert error.site == ""
    assert "expected a loss with a gradient that is the same on all ranks" in str(error)
    assert "'tp', got type R" in str(error)


class Positions(nn.Module):
    """A batch norm, rows' numbers that forward creates, and the loss with label smoothing."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x, labels):
        rows = torch.arange(x.shape[0], dtype=torch.float)
        logits = self.head(self.norm(x)) + rows.unsqueeze(1)
        return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1), rows


def test_norms_and_created_tensors_are_shards(mesh):
    plan = Plan(mesh).annotate(r".*\.grad", P, "dp").factory("", S0, "dp", sizes="local")
    for name in ("x", "labels"):
        plan.redistribute(f"<in:{name}>", R, S0, "dp")
    plan.annotate("norm.<op:batch_norm>", S0, "dp").annotate("<op:cross_entropy>", S0, "dp")
    plan.redistribute("<out:0>", P, R, "dp")
    batch = (torch.randn(4, 4), torch.randint(0, 4, (4,)))
    error = refusal(plan, Positions(), batch)
    assert "got a tensor of (2,), dp=V, tp=R" in str(error)
    typecheck(plan.annotate("<out:1>", S0, "dp"), Positions(), batch)


def test_gradients_of_activations_are_refused_where_they_are_not_reduced(mesh):
    plan = zoo.llama(mesh, dp="dp").redistribute(
        r"model\.layers\.\d+\.mlp.<in>", R, R, "tp", grad_src=R, grad_dst=R
    )
    error = refusal(plan, models.llama(num_hidden_layers=1), tokens())
    assert error.site == "model.layers.0.mlp.gate_proj"
    assert "redistribute(path, Replicate(), Replicate(), 'tp', grad_src=Partial()" in str(error)
    assert "model.layers.0.mlp.gate_proj.weight, dp=R, tp=V" in str(error)


def test_a_sum_of_rows_needs_no_entry_and_losses_of_rows_are_sharded(mesh):
    model = Regression()
    model.reduction = "sum"
    plan = two_linears(mesh).redistribute("<out>", P, R, "dp")
    typecheck(plan, model, (torch.randn(4, 4),))
    model.reduction = "none"
    plan = two_linears(mesh).annotate("<op:mse_loss>", S0, "dp").annotate("<out>", S0, "dp")
    typecheck(plan, model, (torch.randn(4, 4),))


class Averaging(Regression):
    """Computes the mean by its own code."""

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).square().mean()


class Random(Regression):
    """Adds noise that is the same on all ranks."""

    def forward(self, x):
        return super().forward(x + torch.rand(()))


def test_what_a_model_creates_is_replicated(mesh):
    typecheck(regression(mesh), Random(), (torch.randn(4, 4),))


def _context_parallel(mesh):
    plan = zoo.llama(mesh, dp="dp", tp=None, cp="tp")
    with pytest.raises(ValueError, match="expected a plan without context parallelism"):
        typecheck(plan, models.llama(attn_implementation="sdpa"), tokens())


def _on_dtensors(mesh):
    with pytest.raises(ValueError, match=r"expected modules on local tensors, got down on DTensor"):
        typecheck(two_linears(mesh).eager("down"), TwoLinears(), (torch.randn(4, 4),))


def _another_dim(mesh):
    plan = zoo.llama(mesh, dp="dp").annotate("<out:logits>", S1, "dp")
    typecheck(plan, models.llama(num_hidden_layers=1), tokens())


def _own_mean(mesh):
    plan = two_linears(mesh).redistribute("<out>", P, R, "dp")
    typecheck(plan, Averaging(), (torch.randn(4, 4),))


def _phases(mesh):
    plan = zoo.llama(mesh, dp="dp").shard(r".*\.weight", S0, "dp", Phase.OPTIM)
    with pytest.raises(ValueError, match="expected parameters without phases, got"):
        typecheck(plan, models.llama(num_hidden_layers=1), tokens())


UNCHECKED = {
    "`zoo.llama(cp=...)`": _context_parallel,
    "`Plan.eager`": _on_dtensors,
    "phases (ZeRO)": _phases,
    "another dim of one size": _another_dim,
    "a mean in the model's own code": _own_mean,
}


def test_the_page_lists_what_types_do_not_check():
    section = (
        DETAILS.read_text().split("\n## Types\n")[1].split("Not checked are")[1].split("\n## ")[0]
    )
    rows = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
    assert rows[1:] == [*UNCHECKED]


@pytest.mark.parametrize("row", UNCHECKED)
def test_what_the_page_lists_is_not_checked(mesh, row):
    UNCHECKED[row](mesh)


def test_a_check_changes_neither_model_nor_inputs_nor_random_numbers(mesh):
    model, batch = models.llama(num_hidden_layers=1, attention_dropout=0.5), tokens()
    state = {name: one.clone() for name, one in model.state_dict().items()}
    numbers = torch.get_rng_state()
    typecheck(zoo.llama(mesh, dp="dp"), model, batch, fake=False)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(state[name], one) for name, one in model.state_dict().items())
    tensors = [*model.parameters(), *model.buffers(), *batch.values()]
    assert not any(hasattr(one, "_local_type") for one in tensors)
    typecheck(zoo.llama(mesh, dp="dp"), model, batch)


def test_without_spmd_types_or_with_an_older_one_it_is_refused(mesh, monkeypatch):
    arguments = two_linears(mesh), TwoLinears(), (torch.randn(4, 4),)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.2")
    with pytest.raises(ImportError, match=r"spmd-types>=0\.2\.3, got 0\.2\.2.*plan-api\[types\]"):
        typecheck(*arguments)

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"got none: pip install 'plan-api\[types\]'"):
        typecheck(*arguments)
