"""Static mode with sizes that an axis does not divide trains as Eager does, and sends the same."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from plan_api import Plan, generate_static, parallelize, track, zoo
from testkit import (
    FLATTENS_TWO_SHARDED_DIMS,
    NO_FLATTENING,
    CommLog,
    RankError,
    fake_mesh,
    models,
    run_ranks,
)

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_dropout": 0.1}
LAYER = r"model\.layers\.\d+"


def tokens(batch, length, vocabulary=63):
    generator = torch.Generator().manual_seed(batch * 100 + length)
    ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


class Rows(nn.Module):
    """Rows of 6 features, which are not flattened; the loss is a mean over all of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.dropout, self.down = nn.Linear(6, 7), nn.Dropout(0.3), nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x, y):
        out = self.norm(self.down(self.dropout(torch.relu(self.up(x)))))
        return {"loss": F.mse_loss(out, y), "out": out}


def rows(number):
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(number, 6, generator=generator),
        "y": torch.randn(number, 5, generator=generator),
    }


def plan_of_rows(mesh):
    """The batch is sharded along the first axis, features along the second."""
    dp, tp = mesh.mesh_dim_names
    plan = Plan(mesh).shard("<in:x>", S0, dp).shard("<in:y>", S0, dp)
    plan.shard(r"up\.(weight|bias)", S0, tp).shard("down.weight", S1, tp)
    return plan.shard("down.<out>", R, tp).shard("<out:loss>", [R, R])


def gathered_heads(mesh):
    """Three heads of 6 features: shards end within a head, so projections are gathered."""
    plan = Plan(mesh).shard("<in:input_ids>", R, "tp").shard("<in:labels>", R, "tp")
    plan.shard(r"model\.rotary_emb.<in:position_ids>", R).shard(rf"{LAYER}.<in:attention_mask>", R)
    plan.shard(rf"{LAYER}\..*\.(q|k|v|gate|up)_proj\.weight", S0, "tp")
    plan.shard(rf"{LAYER}\.self_attn\.(q|k|v)_proj.<out>", R, "tp")
    plan.shard(rf"{LAYER}\..*\.(o|down)_proj\.weight", S1, "tp")
    plan.shard(rf"{LAYER}\.self_attn\.o_proj.<in>", S2, "tp")
    return plan.shard(rf"{LAYER}\..*\.(o|down)_proj.<out>", R, "tp")


def fully_sharded(zoo_plan, mesh, **options):
    plan = zoo_plan(mesh, dp="dp", sp=True, loss_parallel=True, **options)
    return plan.fully_shard(LAYER, "dp").fully_shard("", "dp")


llama = partial(models.llama, vocab_size=63, intermediate_size=65, **HEADS)
mixtral = partial(models.mixtral, vocab_size=63, num_local_experts=3, num_hidden_layers=1, **HEADS)
TP = {"tp": "tp", "dp": None}

# The model, its plan, and the batches of four steps: lengths and numbers of rows change.
CASES = {
    "llama: sequence, hidden of the MLP, vocabulary": (
        llama,
        partial(zoo.llama, sp=True, loss_parallel=True, **TP),
        [tokens(2, length) for length in (7, 8, 5, 7)],
    ),
    "gpt2: sequence, tied vocabulary, hidden of the MLP": (
        partial(models.gpt2, vocab_size=63, n_inner=65),
        partial(zoo.gpt2, sp=True, loss_parallel=True, **TP),
        [tokens(2, length) for length in (7, 8, 5, 7)],
    ),
    # Only parameters are uneven.
    "mixtral: experts, vocabulary": (
        mixtral,
        partial(zoo.mixtral, ep="tp", loss_parallel=True, **TP),
        [tokens(2, 8)] * 4,
    ),
    "mixtral: experts, and tokens that are dispatched": (
        mixtral,
        partial(zoo.mixtral, ep="tp", sp=True, loss_parallel=True, **TP),
        [tokens(2, length) for length in (7, 8, 5, 7)],
    ),
}
GENERATED = {
    "rows of a batch": (Rows, plan_of_rows, [rows(number) for number in (5, 6, 3, 5)]),
    "heads that are gathered": (
        partial(
            models.llama, hidden_size=18, head_dim=6, intermediate_size=33, vocab_size=63,
            num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=1,
        ),
        gathered_heads,
        [tokens(2, 8)] * 4,
    ),
}  # fmt: skip


def trained(model, batches):
    """Returns the losses of steps, and all full parameters."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach()
        for name, param in model.named_parameters()
    }


def collectives(model, batch):
    """Counts the collectives of a step by name and bytes."""
    with track(model) as record:
        model(**batch)["loss"].backward()
    return Counter((one.name, one.bytes) for one in record.collectives)


def compare(cases, shape, axes, generated=False):
    """Trains in Eager and in static mode; returns what differs, by case."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    found = {}
    for name, (make, plan_of, batches) in cases.items():
        plan = plan_of(mesh)
        if generated:
            plan = generate_static(plan, make(), batches[0])
            assert not [entry for entry in plan.entries if entry.kind.value == "eager"]
        ends = []
        for mode in ("eager", "static"):
            model = parallelize(make(), plan, mode=mode)
            ends.append((*trained(model, batches), collectives(model, batches[0])))
        (losses, params, sent), (its_losses, its_params, its_sent) = ends
        different = [one for one in params if not torch.equal(params[one], its_params[one])]
        found[name] = (len({*losses}), its_losses == losses, different, sent == its_sent)
    return found


def assert_equal(found):
    for name, (distinct, same_losses, different, same_collectives) in found.items():
        assert distinct == 4, name
        assert same_losses, name
        assert different == [], name
        assert same_collectives, name


FAST = ("llama: sequence, hidden of the MLP, vocabulary", "mixtral: experts, vocabulary")


def test_both_modes_train_to_the_same_bits_with_the_same_collectives():
    """Four steps of AdamW with dropout; the guard compares the first one as well."""
    cases = {
        name: (partial(make, num_hidden_layers=1), plan_of, batches)
        for name, (make, plan_of, batches) in CASES.items()
        if name in FAST
    }
    for found in run_ranks(compare, 2, cases, (2,), ("tp",), timeout=300):
        assert_equal(found)


@pytest.mark.slow
def test_further_models_train_to_the_same_bits():
    cases = {name: case for name, case in CASES.items() if case[0] is llama or name not in FAST}
    for found in run_ranks(compare, 2, cases, (2,), ("tp",), timeout=300):
        assert_equal(found)


@pytest.mark.slow
def test_four_ranks_some_of_which_have_nothing_train_to_the_same_bits():
    """Of 5 tokens the ranks have 2, 2, 1 and none."""
    cases = {name: case for name, case in CASES.items() if "mixtral" not in name}
    for found in run_ranks(compare, 4, cases, (4,), ("tp",), timeout=500):
        assert_equal(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATED)
def test_generated_plans_have_uneven_shards(name):
    shape, axes = ((2, 2), ("dp", "tp")) if name == "rows of a batch" else ((4,), ("tp",))
    cases = {name: GENERATED[name]}
    for found in run_ranks(compare, 4, cases, shape, axes, True, timeout=300):
        (facts,) = found.values()
        # Eager reduces the norm's gradients along dp on its own, also where shards are even.
        assert_equal({name: (*facts[:3], facts[3] or len(shape) == 2)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "plan_of"),
    [
        (partial(llama, intermediate_size=64), partial(fully_sharded, zoo.llama)),
        (mixtral, partial(fully_sharded, zoo.mixtral, ep="tp")),
    ],
    ids=["llama", "mixtral"],
)
def test_fully_shard_with_uneven_tensor_parallelism_trains_to_the_same_bits(make, plan_of):
    cases = {"fully_shard": (make, plan_of, [tokens(2, length) for length in (7, 8, 5, 7)])}
    for found in run_ranks(compare, 4, cases, (2, 2), ("dp", "tp"), timeout=300):
        assert_equal(found)


# A batch: Eager does not flatten one that is uneven, as Linear does with tokens; static mode does


def batches_of(*numbers):
    return [tokens(number, 8) for number in numbers]


def test_an_uneven_last_batch_trains_as_on_one_device():
    """The guard compares the first step, whose batch is even."""
    batches = batches_of(4, 3, 4, 3)

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = parallelize(llama(), zoo.llama(mesh, tp=None, dp="dp"), mode="static")
        return trained(model, batches)

    losses, params = trained(llama(), batches)
    for found, its_params in run_ranks(check, 2):
        assert found == pytest.approx(losses, abs=1e-5)
        for name, param in params.items():
            assert torch.allclose(its_params[name], param, atol=1e-4), name


def test_an_uneven_first_batch_that_eager_refuses_is_refused_with_the_remedy():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = zoo.llama(mesh, tp=None, dp="dp")
        parallelize(llama(), plan, mode="static")(**tokens(3, 8))

    with pytest.raises(RankError) as error:
        run_ranks(check, 2)
    assert "let the first step be one of even shards" in str(error.value)


# Operators and outputs


class Calls(nn.Module):
    """Its forward is a function of a test."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def annotated(mesh, function, operator, placement, inputs):
    """Returns a module in static mode that shards its inputs and calls a function."""
    plan = Plan(mesh).annotate(f"<op:{operator}>", placement)
    for number, input_placement in enumerate(inputs):
        plan.redistribute(f"<in:{number}>", R, input_placement)
    return parallelize(Calls(function), plan, mode="static", guard_steps=0)


def test_operators_of_uneven_shards_compute_what_one_device_does():
    """Dropout draws its numbers, in the order of strides, and a mean is over all elements."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = {}
        for placement, is_transposed in ((S0, False), (S1, False), (S0, True), (S1, True)):
            x = torch.arange(1.0, 36.0).view(5, 7)

            def drop(x, is_transposed=is_transposed):
                return F.dropout(x.t() if is_transposed else x, 0.5, True)

            dropped = Shard(1 - placement.dim) if is_transposed else placement
            model = annotated(mesh, drop, "dropout", dropped, [placement])
            torch.manual_seed(7)
            part = model(x)
            torch.manual_seed(7)
            expected = distribute_tensor(drop(x), mesh, [dropped], src_data_rank=None)
            found[placement, is_transposed] = torch.equal(part, expected.to_local())
        for number in (5, 1):  # of one row the second rank has nothing
            x, y = rows(number)["y"].requires_grad_(), rows(number + 9)["y"][:number]
            F.mse_loss(x, y).backward()
            expected, x.grad = x.grad, None
            model = annotated(mesh, F.mse_loss, "mse_loss", S0, [S0, S0])
            loss = model(x, y)
            loss.backward()
            torch.distributed.all_reduce(total := loss.detach().clone())
            found["mean", number] = torch.allclose(total, F.mse_loss(x, y))
            found["gradient", number] = torch.allclose(x.grad, expected)
        return found

    for found in run_ranks(check, 2):
        assert [case for case, same in found.items() if not same] == []


def test_an_uneven_output_is_the_dtensor_of_eager():
    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        plan = generate_static(plan_of_rows(mesh), Rows(), rows(5))
        ends = []
        for mode in ("eager", "static"):
            model = parallelize(Rows(), plan, mode=mode)
            torch.manual_seed(3)
            ends.append(model(**rows(5))["out"])
        eager, static = ends
        return (
            (eager.shape, eager.placements) == (static.shape, static.placements),
            static.shape == (5, 5),
            torch.equal(eager.full_tensor(), static.full_tensor()),
        )

    assert run_ranks(check, 2) == [(True, True, True)] * 2


@pytest.mark.slow
def test_a_module_on_dtensors_takes_uneven_shards():
    """Between modules on local tensors; its input is a shard of 7 tokens."""

    def plan_of(mesh):
        plan = zoo.llama(mesh, sp=True, **TP).eager(r"model\.norm")
        return plan.redistribute(r"model\.norm.<in>", S1, S1, "tp")

    cases = {"norm": (llama, plan_of, [tokens(2, length) for length in (7, 8, 5, 7)])}
    for found in run_ranks(compare, 2, cases, (2,), ("tp",), timeout=300):
        assert_equal(found)


# The exchange of lengths


class Flattened(nn.Module):
    """Flattens rows and columns, whose shards are then not those of torch.chunk."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.flatten(0, 1)).sum()


def test_lengths_are_exchanged_once_and_for_uneven_shapes_only():
    def lengths(log):
        return [call for call in log.calls if call.input_bytes == 8]  # one int64

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = zoo.llama(mesh, dp=None, sp=True)
        model = parallelize(models.llama(**HEADS), plan, mode="static", guard_steps=0)
        counts = []
        for length in (8, 7, 7, 5, 7):
            with CommLog() as log:
                model(**tokens(2, length))
            counts.append(len(lengths(log)))
        return counts

    # Two gathers and one dropout in each of two layers, and a gather before the head.
    assert run_ranks(check, 2) == [[0, 7, 0, 7, 0]] * 2


def test_shards_of_a_flattened_dim_are_refused_on_all_ranks():
    """Of 3 x 4 rows the ranks have 8 and 4, and a shard of 12 has 6."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = Plan(mesh).redistribute("<in>", R, S0)
        plan.redistribute("linear.<in>", S0, R, grad_src=R)
        parallelize(Flattened(), plan, mode="static", guard_steps=0)(torch.ones(3, 4, 4))

    with pytest.raises(RankError) as error:
        run_ranks(check, 2)
    assert [report.state for report in error.value.reports] == ["raised", "raised"]
    assert "linear.forward_pre:<in>:0: expected the shards of a dim 0 of 12" in str(error.value)
    assert "of lengths [6, 6], got [8, 4]" in str(error.value)


def test_nothing_is_exchanged_on_a_fake_group():
    """The global sizes are those that a site, or a parameter, has sharded."""
    with fake_mesh((2,), ("tp",)) as mesh:
        plan = zoo.llama(mesh, dp=None, sp=True, loss_parallel=True)
        model = parallelize(llama(), plan, mode="static", guard_steps=0)
        with CommLog() as log:
            loss = model(**tokens(2, 7))["loss"]
        loss.backward()
        assert [call for call in log.calls if call.input_bytes == 8] == []
