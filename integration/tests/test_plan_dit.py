"""The zoo's plan of a DiT: trained as on one device, in Eager and static mode, and validated."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from integration.models.dit import DiffusionLoss, DiT
from integration.systems.zoo import with_noise_loss
from plan_api import (
    Plan,
    StaticError,
    generate_static,
    installed,
    lower,
    parallelize,
    plan_communication,
    track,
    typecheck,
    zoo,
)
from testkit import fake_mesh, models, run_ranks
from testkit.inspection.dtensor_operators import DTensorOperators

STEPS = 8


def small_dit(**changes):
    torch.manual_seed(0)
    return DiffusionLoss(DiT(**{"dropout": 0.1} | changes)).train()


def random_dit(**changes):
    """Returns a DiT whose gates are open."""
    return models.nowhere_zero(small_dit(**changes))


def noise_loss(model):
    """Returns the loss of a batch of 4 random images and their noise."""
    images, noise = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8)
    return model(images, torch.randint(0, 1000, (4,)), torch.randint(0, 10, (4,)), noise)


def dit_plan(mesh, sp=False):
    return with_noise_loss(zoo.dit(mesh, dp="dp", sp=sp), "dp")


def without(plan, path):
    """Returns a plan without its one entry whose path ends in this."""
    data = json.loads(plan.to_json())
    entries = [one for one in data["entries"] if not one["path"].endswith(path)]
    assert len(entries) == len(data["entries"]) - 1, path
    return Plan.from_json(json.dumps(data | {"entries": entries}), plan.mesh)


@dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
        losses: losses of the steps.
        norms: norms of the gradients of one more batch; an optimizer like Adam hides a factor.
    """

    losses: list[float]
    norms: list[float]


def trained(model, steps=STEPS):
    losses = models.train(model, noise_loss, steps=steps)
    noise_loss(model).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    full = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return Trained(losses, [grad.norm().item() for grad in full])


def drawn_again(model):
    torch.manual_seed(1)
    model.model.initialize_weights()
    return model


@pytest.mark.ranks
@pytest.mark.parametrize("shape", [(1, 2), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_a_dit_trains_as_on_one_device(shape):
    """With sequence parallelism and without; parameters and dropout are drawn on the mesh."""

    def check():
        import ragged_shard

        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        found = []
        for sp in (False, True):
            model = drawn_again(parallelize(small_dit(), dit_plan(mesh, sp)))
            one_device = drawn_again(small_dit()).parameters()
            pairs = zip(model.parameters(), one_device, strict=True)
            equal = all(torch.equal(actual.full_tensor(), native) for actual, native in pairs)
            with ragged_shard.strict():
                result = trained(model)
            state = installed(model)
            found.append((result, equal, state.extras, list(state.coverage.unused_sites)))
        return found

    expected = trained(drawn_again(small_dit()))
    for found in run_ranks(check, shape[0] * shape[1], timeout=300):
        for actual, equal, extras, unused in found:
            assert actual.losses == pytest.approx(expected.losses, abs=1e-5, rel=0)
            assert actual.norms == pytest.approx(expected.norms, abs=1e-6, rel=0.01)
            assert equal
            assert extras == ("dist-rng", "dtensor-rules", "fused-comm")
            assert unused == []


@pytest.mark.parametrize("sp", [False, True])
def test_the_plan_of_a_dit_has_the_right_types(sp):
    images = torch.randn(4, 4, 8, 8)
    batch = (images, torch.randint(0, 1000, (4,)), torch.randint(0, 10, (4,)), images)
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        typecheck(dit_plan(mesh, sp), small_dit(), batch)
        plan = without(dit_plan(mesh, sp), r"mlp\.fc2)\.bias")
        with pytest.raises(StaticError, match=r"attn\.proj\.bias, dp=R, tp=I"):
            typecheck(plan, small_dit(), batch)


def test_dropout_is_enabled(monkeypatch):
    """Without dropout the losses are different, so the test above does test it."""
    on = models.train(drawn_again(small_dit()), noise_loss, steps=3)
    monkeypatch.setattr(nn.functional, "dropout", lambda x, *args, **options: x)
    assert models.train(drawn_again(small_dit()), noise_loss, steps=3) != on


def _train_in(mode, mesh, sp):
    model = parallelize(random_dit(), dit_plan(mesh, sp), mode=mode, guard_steps=0)
    losses = models.train(model, noise_loss, steps=STEPS)
    noise_loss(model).backward()
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    params = {name: param.detach().to_local() for name, param in named}
    grads = {name: param.grad.to_local() for name, param in named if param.grad is not None}
    return losses, params, grads, list(installed(model).coverage.unused_sites)


@pytest.mark.ranks
@pytest.mark.parametrize("shape", [(1, 2), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_static_mode_trains_a_dit_bit_for_bit_as_eager(shape):
    """Steps of AdamW with dropout."""

    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        return [[_train_in(mode, mesh, sp) for mode in ("eager", "static")] for sp in (False, True)]

    for found in run_ranks(check, shape[0] * shape[1], timeout=300):
        for eager, static in found:
            losses, params, grads, unused = static
            assert len(losses) == STEPS
            assert losses == eager[0]
            assert losses[-1] != losses[0]
            for actual, expected in ((params, eager[1]), (grads, eager[2])):
                assert actual.keys() == expected.keys()
                assert all(torch.equal(actual[name], expected[name]) for name in actual)
            assert all(grad.any() for grad in grads.values())
            assert unused == []


def _without_reductions(plan):
    """Returns the plan without the reductions of gradients that modules share."""
    return without(without(plan, "(attn|mlp).<in>"), "adaLN_modulation\\.1.<in>")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("plan_of", [dit_plan, lambda mesh: _without_reductions(dit_plan(mesh))])
def test_generated_plans_of_a_dit_train_twenty_steps_to_the_bits_of_eager(plan_of, shape):
    """With the collectives of Eager, whose plan has the same reductions."""
    images = torch.randn(4, 4, 8, 8)
    numbers = torch.zeros(4, dtype=torch.int64)
    batch = (images, numbers, numbers, images)

    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        planned = plan_communication(plan_of(mesh), random_dit(), batch)
        generated = generate_static(plan_of(mesh), random_dit(), batch)
        found = []
        for plan, mode in ((planned, "eager"), (generated, "static")):
            model = parallelize(random_dit(), plan, mode=mode)
            losses = models.train(model, noise_loss, steps=20)
            found.append((losses, [param.detach().to_local() for param in model.parameters()]))
        return *found, installed(model).check(*batch)

    for (losses, params), (static_losses, static_params), differences in run_ranks(
        check, shape[0] * shape[1], timeout=580
    ):
        assert len(set(losses)) == 20
        assert static_losses == losses
        assert all(map(torch.equal, static_params, params))
        assert differences == ()


@pytest.mark.ranks
@pytest.mark.parametrize("rules", [True, False], ids=["dtensor-rules", "torch alone"])
def test_no_operator_takes_a_dtensor_in_a_static_step_of_a_dit(rules):
    """In forward, backward, optimizer and zero_grad of three steps."""

    def check():
        import dtensor_rules

        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(random_dit(), dit_plan(mesh, True), mode="static", guard_steps=0)
        optimizer = torch.optim.AdamW(model.parameters())
        if not rules:
            dtensor_rules.disable()
        counted = []
        for _ in range(3):
            with DTensorOperators() as seen:
                noise_loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            counted.append(seen.counts)
        return counted

    assert run_ranks(check, 2, timeout=300) == [[{}] * 3] * 2


TP, DP = (1, 2), (2, 1)


def _condition_not_reduced(mesh):
    path, whole = r"blocks\.\d+\.adaLN_modulation\.1.<in>", Replicate()
    plan = zoo.dit(mesh, dp="dp").redistribute(
        path, whole, whole, "tp", grad_src=whole, grad_dst=whole
    )
    return with_noise_loss(plan, "dp")


# By error in the plan: the mesh, the model, the plan, and the site and a part of the message.
WRONG = {
    "a gradient that is not reduced, behind closed gates": (
        TP,
        small_dit,
        _condition_not_reduced,
        "model.blocks.0.adaLN_modulation.0",
        "the gradient of what is returned by",
    ),
    "a reshape with all heads": (
        TP,
        random_dit,
        lambda mesh: without(dit_plan(mesh), r"attn.<op:reshape:0>"),
        "model.blocks.0.attn",
        "shape .* is invalid.*its code may name global sizes",
    ),
    "a mean over a sharded batch": (
        DP,
        random_dit,
        lambda mesh: without(dit_plan(mesh), "<op:mse_loss>"),
        "criterion",
        "what is returned by criterion: ",
    ),
}


@pytest.mark.ranks
def test_plans_of_a_dit_with_one_wrong_line_are_refused_in_the_first_step_by_site():
    def check():
        meshes = {
            shape: init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) for shape in (TP, DP)
        }
        found = {}
        for name, (shape, make, plan, *_) in {**WRONG, "": (TP, random_dit, dit_plan)}.items():
            model = parallelize(make(depth=1), plan(meshes[shape]), mode="static")
            torch.manual_seed(2)
            try:
                noise_loss(model)
                found[name] = None
            except ValueError as error:
                found[name] = type(error).__name__, getattr(error, "site", None), str(error)
        return found

    for found in run_ranks(check, 2, timeout=300):
        assert found.pop("") is None
        for name, (*_, site, pattern) in WRONG.items():
            kind, found_site, message = found[name]
            assert kind == "StaticError", name
            assert found_site == site, name
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(message.replace("\n", " "))


def _collectives(model):
    noise_loss(model).backward()
    model.zero_grad()
    with track(model) as record:
        noise_loss(model).backward()
    return Counter((one.name, one.bytes) for one in record.collectives)


@pytest.mark.slow  # plan-api has the same of LLaMA
def test_a_plan_without_reductions_of_gradients_communicates_as_the_one_with_them():
    """Which is as by hand: 11 all-reduces and 3 all-gathers (packages/plan-api/benchmarks)."""
    with fake_mesh((8,), ("tp",)) as mesh:
        complete = zoo.dit(mesh).under("model")
        written = _without_reductions(complete)
        make = partial(random_dit, hidden_size=64, num_heads=8)
        images = torch.randn(4, 4, 8, 8)
        numbers = torch.zeros(4, dtype=torch.int64)
        batch = (images, numbers, numbers, images)
        planned = plan_communication(written, make(), batch)
        assert plan_communication(complete, make(), batch) is complete
        by_hand = _collectives(parallelize(make(), complete))
        assert Counter(name for name, _ in by_hand.elements()) == {
            "all_reduce": 11,
            "all_gather": 3,
        }
        assert _collectives(parallelize(make(), planned)) == by_hand
        assert _collectives(parallelize(make(), written)) != by_hand
        static = generate_static(written, make(), batch)
        model = parallelize(make(), static, mode="static", guard_steps=0)
        assert _collectives(model) == by_hand


def test_heads_that_tp_does_not_divide_are_refused():
    model = small_dit(hidden_size=24, num_heads=3).model
    message = (
        r"(?s)blocks\.1\.attn\.qkv\.weight is 3 times blocks\.1\.attn's head_dim \(8\)"
        ".*axis 'tp' of size 2 does not divide 3"
    )
    with fake_mesh((2, 2), ("dp", "tp")) as mesh, pytest.raises(ValueError, match=message):
        lower(zoo.dit(mesh), model)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("axes", "method", "steps"),
    [
        (("cp",), "ring", STEPS),
        *(
            pytest.param(axes, method, 20, marks=pytest.mark.slow)
            for axes, method in [
                (("cp",), "ring"),
                (("cp",), "all-gather"),
                (("cp",), "ulysses"),
                (("dp", "cp"), "ring"),
                (("cp", "tp"), "ring"),
                (("cp", "tp"), "ulysses"),
            ]
        ),
    ],
    ids=str,
)
def test_a_dit_trains_with_context_parallelism(axes, method, steps):
    """The sequence is the patches, between their embedding and the final layer; dropout is on.

    In both modes, of which static mode compares its first step with Eager.
    """
    dp, ranks = [axis for axis in axes if axis == "dp"], 2 ** len(axes)

    def check():
        mesh, found = init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes), []
        options = {name: name if name in axes else None for name in ("tp", "dp", "cp")}
        for mode in ("eager", "static"):
            plan = with_noise_loss(zoo.dit(mesh, **options, cp_method=method), *dp)
            model = parallelize(random_dit(), plan, mode=mode, strict=True)
            found.append((trained(model, steps), list(installed(model).coverage.unused_sites)))
        return found

    expected = trained(random_dit(), steps)
    for found in run_ranks(check, ranks, timeout=500 if ranks == 4 else 100):
        for actual, unused in found:
            assert len(actual.losses) == steps
            assert actual.losses == pytest.approx(expected.losses, abs=1e-5, rel=0)
            assert actual.norms == pytest.approx(expected.norms, abs=1e-6, rel=1e-4)
            assert unused == []


def test_context_parallelism_of_a_dit_beside_sp_is_refused():
    message = r"zoo.dit: expected cp='cp' without sp.*sp=False"
    with fake_mesh((2, 2), ("cp", "tp")) as mesh, pytest.raises(ValueError, match=message):
        zoo.dit(mesh, cp="cp", sp=True)
