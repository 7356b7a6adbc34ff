"""Static mode with heads that the axis does not divide trains as one device does."""

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import Plan, explain, installed, lower, parallelize, zoo
from ragged_shard import InterleavedShard
from testkit import (
    FLATTENS_TWO_SHARDED_DIMS,
    NO_FLATTENING,
    CommLog,
    RankError,
    models,
    run_ranks,
)

needs_flattening = pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)

R, S0, S1 = Replicate(), Shard(0), Shard(1)
STEPS = 20
SIX = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}


def llama(dtype=torch.float32, **changes):
    """6 heads in 3 groups: of two ranks, one has 4 heads and the other 2."""
    options = SIX | {"num_hidden_layers": 1, "attention_dropout": 0.1} | changes
    return models.llama(**options).to(dtype)


def gpt2(dtype=torch.float32, **changes):
    """5 heads: 3 and 2 of them."""
    return models.gpt2(**{"n_embd": 20, "n_head": 5, "n_layer": 1} | changes).to(dtype)


def vit(dtype=torch.float32):
    """3 heads: 2 and 1 of them."""
    return models.vit(hidden_size=24, num_attention_heads=3, num_hidden_layers=1).to(dtype)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 64, (4, 8), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def images(number):
    generator = torch.Generator().manual_seed(number)
    return {
        "pixel_values": torch.randn(4, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 10, (4,), generator=generator),
    }


def train(model, steps, optimizer=None, batches=batch):
    """Clips gradients; returns the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in steps:
        torch.manual_seed(step)
        inputs = batches(step)
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(next(model.parameters()).dtype)
        loss = model(**inputs)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(model):
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for name, param in model.named_parameters()
    }


def static(make, plan_of, shape=(2,), axes=("tp",), **options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    return parallelize(make(), plan_of(mesh), mode="static", **options)


def trained(*args):
    model, batches = static(*args[1:]), images if args[0] == "vit" else batch
    return train(model, range(STEPS), batches=batches), full(model)


def assert_trains_as_one_device(ranks, name, make, plan_of, shape=(2,), axes=("tp",)):
    model = make()
    # transformers computes the loss in float32, and ranks that shard it sum parts of it.
    is_exact = next(model.parameters()).dtype == torch.float64 and shape != (2, 2)
    tolerance = 1e-12 if is_exact else 1e-5
    losses = train(model, range(STEPS), batches=images if name == "vit" else batch)
    assert len({*losses}) == STEPS
    expected = full(model)
    for found, params in run_ranks(trained, ranks, name, make, plan_of, shape, axes, timeout=300):
        assert found == pytest.approx(losses, abs=tolerance, rel=0)
        for name, param in expected.items():
            torch.testing.assert_close(params[name], param, atol=10 * tolerance, rtol=0)


def of_all_options(zoo_plan):
    return partial(zoo_plan, sp=True, loss_parallel=True)


CASES = {
    "llama": (llama, zoo.llama),
    "gpt2": (gpt2, of_all_options(zoo.gpt2)),
    "llama in float64": (partial(llama, torch.float64), partial(zoo.llama, sp=True)),
    "gpt2 in float64": (partial(gpt2, torch.float64), zoo.gpt2),
    "fused attention": (
        partial(llama, attn_implementation="sdpa", attention_dropout=0.0),
        zoo.llama,
    ),
    "fused attention with dropout": (partial(llama, attn_implementation="sdpa"), zoo.llama),
    "vit": (partial(vit, torch.float64), zoo.vit),
}
FAST = ("llama",)


@pytest.mark.ranks
@needs_flattening
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in CASES]
)
def test_two_ranks_train_as_one_device(name):
    """With dropout and clipping; the first step is compared with Eager."""
    assert_trains_as_one_device(2, name, *CASES[name])


@pytest.mark.ranks
@needs_flattening
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2 in float64", "fused attention"])
def test_four_ranks_of_which_some_have_no_heads_train_as_one_device(name):
    """Of 3 groups of heads the last rank has none, and of 5 heads the ranks have 2, 2, 1 and 0."""
    assert_trains_as_one_device(4, name, *CASES[name], (4,))


def fully_sharded(zoo_plan, mesh):
    layer = r"(model\.layers|transformer\.h)\.\d+"
    plan = zoo_plan(mesh, dp="dp", sp=True, loss_parallel=True)
    return plan.fully_shard(layer, "dp").fully_shard("", "dp")


@pytest.mark.ranks
@needs_flattening
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama in float64", "gpt2 in float64"])
def test_fully_shard_beside_uneven_heads_trains_as_one_device(name):
    make, zoo_plan = CASES[name][0], zoo.llama if "llama" in name else zoo.gpt2
    plan_of = partial(fully_sharded, zoo_plan)
    assert_trains_as_one_device(4, name, make, plan_of, (2, 2), ("dp", "tp"))


@pytest.mark.ranks
@needs_flattening
def test_each_rank_has_whole_heads_and_sends_what_it_does_with_even_ones():
    def check():
        found = []
        for changes in ({}, {"num_attention_heads": 8, "num_key_value_heads": 4}):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            model = llama(head_dim=4, **changes)
            parallelize(model, zoo.llama(mesh, sp=True), mode="static")
            model(**batch(0))["loss"].backward()
            with CommLog() as log:
                loss = model(**batch(1))["loss"]
                loss.backward()
            assert installed(model).check(**batch(0)) == ()
            of_attention = [
                (tuple(one.to_local().shape), tuple(one.grad.to_local().shape))
                for name, one in model.named_parameters()
                if "self_attn" in name
            ]
            found.append((of_attention, log.counts(), log.wire_bytes()))
        return found

    first, second = run_ranks(check, 2)
    # Queries, keys, values and the output, of heads of 4 features.
    shapes = [((16, 24), (8, 24), (8, 24), (24, 16)), ((8, 24), (4, 24), (4, 24), (24, 8))]
    for rank, (uneven, even) in enumerate((first, second)):
        assert uneven[0] == [(shape, shape) for shape in shapes[rank]]
        assert uneven[1:] == even[1:]


@pytest.mark.ranks
@needs_flattening
def test_training_is_resumed_from_a_checkpoint(tmp_path):
    """On the same ranks, and on one device."""

    def state_of(model, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def check():
        first = static(llama, zoo.llama)
        optimizer = torch.optim.AdamW(first.parameters(), lr=1e-3)
        losses = train(first, range(2), optimizer)
        dcp.save(state_of(first, optimizer), checkpoint_id=tmp_path)
        model = static(partial(llama, initializer_range=0.5), zoo.llama)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return losses + train(model, range(2, 4), optimizer)

    def load():
        model = llama(initializer_range=0.5)
        dcp.load(state := {"model": model.state_dict()}, checkpoint_id=tmp_path)
        model.load_state_dict(state["model"])
        return full(model)

    alone = llama()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    losses, expected = train(alone, range(2), optimizer), full(alone)
    losses += train(alone, range(2, 4), optimizer)
    for found in run_ranks(check, 2):
        assert found == pytest.approx(losses, abs=1e-5)
    (params,) = run_ranks(load, 1)
    for name, param in expected.items():
        torch.testing.assert_close(params[name], param, atol=1e-5, rtol=0)


@pytest.mark.ranks
@needs_flattening
def test_initial_numbers_are_those_of_one_device():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = parallelize(llama(), zoo.llama(mesh), mode="static", guard_steps=0)
        models.reinitialize(model)
        return full(model)

    alone = llama()
    models.reinitialize(alone)
    for found in run_ranks(check, 2):
        for name, param in full(alone).items():
            assert torch.equal(found[name], param), name


# What is refused


class Attention(nn.Module):
    """Attention of one device with 3 heads of 2 features, whose output is a sum over heads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head_dim = 2
        self.query, self.out = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        heads = self.query(x).view(*x.shape[:-1], -1, self.head_dim)
        return self.out(heads.relu().flatten(-2))


class Block(nn.Module):
    """Attention inside of another module."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return self.attention(x).square().sum()


def plan_of_block(mesh, out_unit="head_dim", grad_src=None):
    plan = Plan(mesh).shard(r"attention\.query\.weight", S0, "tp", unit="head_dim")
    plan.shard(r"attention\.out\.weight", S1, "tp", unit=out_unit)
    plan.redistribute(
        "attention.<in>", R, R, "tp", grad_src=Partial() if grad_src is None else grad_src,
        grad_dst=R,
    )  # fmt: skip
    return plan.redistribute("attention.<out>", Partial(), R, "tp")


@pytest.mark.ranks
@needs_flattening
def test_a_wrong_plan_is_found_by_the_first_step():
    """A gradient that is a sum over heads is taken for the whole."""

    def check(grad_src):
        x = torch.ones(3, 4)
        up = nn.Sequential(nn.Linear(4, 4), Block())
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(1)
        plan = Plan(mesh)
        plan._entries = [
            entry.under("1") for entry in plan_of_block(mesh, grad_src=grad_src).entries
        ]
        parallelize(up, plan, mode="static")(x).backward()
        return True

    assert run_ranks(check, 2, None) == [True, True]
    with pytest.raises(RankError, match="static mode does not compute what Eager does") as error:
        run_ranks(check, 2, R)
    assert "the gradient of 0.weight" in str(error.value)


def test_eager_refuses_them_and_names_static_mode(mesh):
    plan = plan_of_block(mesh)
    with pytest.raises(ValueError, match="does not divide 3; use mode='static'"):
        lower(plan, Block())
    lowered = lower(plan, Block(), mode="static")
    placements = [schedule.run[-1] for schedule in lowered.schedules.values()]
    assert placements == [InterleavedShard(0, 1, unit=2), InterleavedShard(1, 1, unit=2)]
    assert "IS(0,1x2)" in str(explain(plan, Block()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda plan: plan.shard(r"attention\.out\.weight", S1, "tp"),
            r"expected unit= for attention\.out\.weight, as ranks along 'tp' have different "
            r"numbers of the units of attention\.query\.weight, .*got S\(1\) of none",
        ),
        (lambda plan: plan.eager("attention"), "does not divide 3"),
        (
            lambda plan: plan.shard(r"attention\.query\.weight", S0, "dp", unit="head_dim"),
            "expected one axis that shards it",
        ),
    ],
    ids=["another parameter without units", "a module on DTensors", "two axes"],
)
def test_what_has_no_shards_of_whole_heads_is_refused(mesh, change, message):
    with pytest.raises(ValueError, match=message):
        lower(change(plan_of_block(mesh)), Block(), mode="static")


def test_units_of_operators_and_groups_are_stored(mesh):
    groups = ("num_key_value_groups", "head_dim")
    plan = Plan(mesh).annotate("attention.<op:dropout>", S1, "tp", unit="head_dim")
    plan.shard(r"attention\.query\.weight", S0, "tp", unit=groups)
    assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries
    with pytest.raises(ValueError, match="only operators have units"):
        Plan(mesh).annotate("attention.<out>", S1, "tp", unit=2)
