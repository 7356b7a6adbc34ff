"""Plans that are wrong in one line do not train: the first step is validated against Eager."""

import json
import logging
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import Plan, StaticError, installed, parallelize, typecheck, zoo
from plan_api.runtime.agreement import first_site_on_any_rank, true_on_any_rank
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, fake_mesh, models, run_ranks
from testkit.models import TwoLinears

needs_flattening = pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
TP, DP = (1, 2), (2, 1)
LAYER = r"model\.layers\.\d+"


def _without(plan, path):
    """Returns a plan without its one entry whose path ends in this."""
    data = json.loads(plan.to_json())
    entries = [one for one in data["entries"] if not one["path"].endswith(path)]
    assert len(entries) == len(data["entries"]) - 1, path
    return Plan.from_json(json.dumps(data | {"entries": entries}), plan.mesh)


def _llama():
    options = {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_dropout": 0.1}
    return models.nowhere_zero(models.llama(num_hidden_layers=1, **options))


def _vit():
    return models.nowhere_zero(models.vit(num_hidden_layers=1))


def _gpt2():
    return models.nowhere_zero(models.gpt2(n_layer=1))


def _fresh_vit():
    return models.vit(num_hidden_layers=1)


def _padded():
    return _llama()


def _llama_padded(mesh):
    return _llama_dp(mesh).shard("<in:attention_mask>", S0, "dp")


def _padded_loss(model):
    ids = torch.randint(0, 64, (4, 8))
    mask = torch.ones_like(ids)
    mask[0, 6:], mask[3, 5:] = 0, 0
    return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


_llama_dp = partial(zoo.llama, dp="dp")
_llama_sp = partial(zoo.llama, dp="dp", sp=True)
_llama_loss = partial(zoo.llama, dp="dp", loss_parallel=True)
_vit_dp = partial(zoo.vit, dp="dp")


class ClosedGate(TwoLinears):
    """A residual branch whose gate begins at zero, as in a DiT, and hides what precedes it."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        x = self.first(x)
        return (x + self.gate * self.down(torch.tanh(self.up(x)))).square().mean()


def _gate(mesh):
    plan = Plan(mesh).redistribute("<in>", [R, R], [R, R]).shard(r"up\.(weight|bias)", S0, "tp")
    plan.shard(r"down\.weight", S1, "tp").redistribute(r"down\.bias", R, P, "tp")
    plan.redistribute("up.<in>", R, R, "tp", grad_src=P, grad_dst=R)
    return plan.redistribute("down.<out>", P, R, "tp")


# By error in the plan: the mesh, the model, the plan, and the site and words of the message.
WRONG = {
    "norms' gradients under sequence parallelism": (
        TP, _llama, lambda mesh: _without(_llama_sp(mesh), r"norm\.weight\.grad"),
        "model.layers.0.input_layernorm.weight", r"Partial\(sum\)\), the plan's .*Replicate\(\)\)",
    ),
    "gradients of a sharded batch": (
        DP, _llama, lambda mesh: _without(_llama_dp(mesh), r".*\.grad"),
        "model.embed_tokens.weight", r"\(Partial\(sum\), .* the plan's \(Replicate\(\), ",
    ),
    "cross entropy of a sharded batch": (
        DP, _llama, lambda mesh: _without(_llama_dp(mesh), "<op:cross_entropy>"),
        "", "what is returned by the model: .* from Eager's",
    ),
    "cross entropy of a sharded vocabulary": (
        TP, _llama,
        lambda mesh: _llama_loss(mesh).annotate("<op:cross_entropy>", R, "tp"),
        "", "what is returned by the model: .* from Eager's",
    ),
    "a view with the global vocabulary": (
        TP, _llama, lambda mesh: _without(_llama_loss(mesh), "<op:view>"),
        "", "what follows it: .*its code may name global sizes",
    ),
    "a loss that is not reduced": (
        DP, _llama, lambda mesh: _without(_llama_dp(mesh), "<out:loss>"),
        "", r"\(Partial\(sum\), Replicate\(\)\) in Eager, and a plain local tensor",
    ),
    "logits with another placement": (
        DP, _llama, lambda mesh: _llama_dp(mesh).annotate("<out:logits>", S1, "dp"),
        None, r"forward:<out>:logits is S\(0\) along 'dp', and the plan says S\(1\)",
    ),
    "logits without a placement": (
        DP, _llama, lambda mesh: _without(_llama_dp(mesh), "<out:logits>"),
        "", r"\(4, 8, 64\) is \(Shard\(dim=0\), .*add annotate\('<out:",
    ),
    "dropout as if replicated": (
        TP, _llama,
        lambda mesh: _llama_dp(mesh).annotate(rf"{LAYER}\.self_attn.<op:dropout>", R, "tp"),
        "model.layers.0.self_attn.o_proj", "what is returned by model.layers.0.self_attn.o_proj",
    ),
    "a gradient that is not reduced": (
        TP, _llama,
        lambda mesh: _llama_dp(mesh).redistribute(
            rf"{LAYER}\.mlp.<in>", R, R, "tp", grad_src=R, grad_dst=R
        ),
        "model.layers.0.post_attention_layernorm", "the gradient of what is returned by",
    ),
    "a gradient that is reduced twice": (
        TP, _llama,
        lambda mesh: _llama_sp(mesh).redistribute("lm_head.<in>", S1, R, "tp", grad_src=P),
        "model.norm", "the gradient of what is returned by",
    ),
    "a product that is not reduced": (
        TP, _llama, lambda mesh: _llama_dp(mesh).redistribute(rf"{LAYER}\.mlp.<out>", R, R, "tp"),
        "model.layers.0.mlp", "mlp.forward:<out>:0 is P along 'tp', and the plan says R",
    ),
    "a mask sharded along the queries": (
        TP, _llama,
        lambda mesh: _llama_dp(mesh).redistribute(rf"{LAYER}.<in:attention_mask>", R, S2, "tp"),
        "model.layers.0.self_attn", "The size of tensor a",
    ),
    "a bias that is added on every rank": (
        TP, _vit, lambda mesh: _without(_vit_dp(mesh), r"(o_proj|fc2)\.bias"),
        "vit.layers.0.attention.o_proj", "what is returned by vit.layers.0.attention.o_proj",
    ),
    "the same while all biases are zero": (
        TP, _fresh_vit, lambda mesh: _without(_vit_dp(mesh), r"(o_proj|fc2)\.bias"),
        "vit.layers.0.attention.o_proj", "what is returned by vit.layers.0.attention.o_proj",
    ),
    "a gradient that is not reduced, behind closed gates": (
        TP, ClosedGate,
        lambda mesh: _gate(mesh).redistribute("up.<in>", R, R, "tp", grad_src=R, grad_dst=R),
        "first", "the gradient of what is returned by first",
    ),
}  # fmt: skip
RIGHT = {
    "llama": (DP, _llama, _llama_dp),
    "llama, sequence parallel": (TP, _llama, _llama_sp),
    "llama, loss parallel": (TP, _llama, _llama_loss),
    "vit": (TP, _vit, _vit_dp),
    "a closed gate": (TP, ClosedGate, _gate),
    "vit, no axis of the batch": (TP, _vit, zoo.vit),
    "gpt2, no axis of the batch": (TP, _gpt2, zoo.gpt2),
    "gpt2, loss parallel": (TP, _gpt2, partial(zoo.gpt2, dp="dp", loss_parallel=True)),
    "llama with padding": (DP, _padded, _llama_padded),
}


LOSSES = {
    _llama: models.token_loss, _gpt2: models.token_loss, _padded: _padded_loss,
    _vit: models.image_loss, _fresh_vit: models.image_loss,
    ClosedGate: lambda model: model(torch.randn(4, 4)),
}  # fmt: skip


def _loss(make, model):
    torch.manual_seed(2)
    return LOSSES[make](model)


@contextmanager
def _logged():
    """Yields the messages that are logged inside of the block, on this rank."""
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("plan_api").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("plan_api").removeHandler(handler)


def _first_steps():
    """Returns by name the type, site and message of the first step's error; None without one."""
    meshes = {
        shape: init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) for shape in (TP, DP)
    }
    found = {}
    for name, (shape, make, plan, *_) in (RIGHT | WRONG).items():
        model = parallelize(make(), plan(meshes[shape]), mode="static")
        try:
            with _logged() as messages:
                _loss(make, model)
            found[name] = None
        except ValueError as error:
            found[name] = type(error).__name__, getattr(error, "site", None), str(error)
        if name in RIGHT:
            found[name, "logged"] = [one.splitlines()[-1] for one in messages]
    shape, make, plan, *_ = WRONG["norms' gradients under sequence parallelism"]
    model = parallelize(make(), plan(meshes[shape]), mode="static", guard_steps=0)
    found["not guarded"] = _loss(make, model).item()
    return found


@pytest.mark.ranks
@needs_flattening
def test_plans_with_one_wrong_line_are_refused_in_the_first_step_by_site():
    for found in run_ranks(_first_steps, 2, timeout=500):
        assert found.pop("not guarded") > 0  # guard_steps=0
        assert {name: error for name, error in found.items() if name in RIGHT and error} == {}
        logged = {name: found[name, "logged"] for name in RIGHT if found[name, "logged"]}
        # Which DTensor gathers, as the model indexes it.
        (message,) = logged.pop("llama with padding")
        assert "0 all_gather of 0 bytes along 'dp', in Eager 1 of 32 bytes" in message
        assert logged == {}
        for name, (*_, site, _) in WRONG.items():
            assert found[name] is not None, name
            kind, found_site, message = found[name]
            assert kind == "StaticError", name
            assert site in (found_site, None), name
            assert message.startswith(("static mode does not compute", "the model fails in")), name
        for name, (*_, words) in WRONG.items():
            with pytest.raises(ValueError, match=words):
                raise ValueError(found[name][2].replace("\n", " "))


def _batch(make):
    ids = torch.randint(0, 64, (4, 8))
    if make in (_vit, _fresh_vit):
        return {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 10, (4,))}
    if make is ClosedGate:
        return (torch.randn(4, 4),)
    masks = {"attention_mask": torch.ones_like(ids)} if make is _padded else {}
    return {"input_ids": ids, "labels": ids.clone(), **masks}


@pytest.mark.parametrize("name", RIGHT)
def test_types_accept_the_right_plans(name):
    shape, make, plan = RIGHT[name]
    with fake_mesh(shape, ("dp", "tp")) as mesh:
        typecheck(plan(mesh), make(), _batch(make))


# Types do not tell dims apart; see the table of docs/packages/plan-api/details.md.
@pytest.mark.parametrize("name", [one for one in WRONG if one != "logits with another placement"])
def test_types_refuse_the_wrong_plans_without_a_number(name):
    shape, make, plan, site, _ = WRONG[name]
    with fake_mesh(shape, ("dp", "tp")) as mesh, pytest.raises(StaticError) as error:
        typecheck(plan(mesh), make(), _batch(make))
    # Where a gradient is wrong, the module that takes the tensor, and not the one that made it.
    taken_by = {
        "a gradient that is not reduced": "model.layers.0.mlp.gate_proj",
        "a gradient that is reduced twice": "lm_head",
        "a gradient that is not reduced, behind closed gates": "up",
        "dropout as if replicated": "model.layers.0.self_attn",
    }
    assert error.value.site == taken_by.get(name, site.removesuffix(".weight"))


class Branching(TwoLinears):
    """Its forward may take another branch, for which the plan is wrong."""

    def __init__(self):
        super().__init__()
        self.centred = False
        self.register_buffer("calls", torch.zeros(()))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        self.calls += 1
        hidden = torch.tanh(self.up(self.drop(x)))
        if self.centred:  # over all features, which are sharded
            hidden = hidden - hidden.mean()
        return self.down(hidden).square().mean()


def _branching(mesh, **options):
    plan = Plan(mesh).shard(r"up\.(weight|bias)", S0).shard(r"down\.weight", S1)
    plan.redistribute(r"down\.bias", R, P).annotate("drop.<op:dropout>", R)
    plan.redistribute("up.<in>", R, R, grad_src=P, grad_dst=R)
    plan.redistribute("<in>", R, R).redistribute("down.<out>", P, R)
    return parallelize(Branching(), plan, mode="static", **options)


def _site_of(call, *args):
    """Returns the site of the error of a call; None without an error."""
    try:
        call(*args)
    except ValueError as error:
        return getattr(error, "site", "no site")
    return None


@pytest.mark.ranks
def test_a_forward_that_takes_another_branch_is_refused_by_check():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        batch = torch.randn(4, 4)
        found = {}
        for steps in (0, 1, 2):
            model = _branching(mesh, guard_steps=steps)
            first = _site_of(model, batch)
            fine = installed(model).check(batch)
            model.centred = True
            found[steps] = (
                first, fine, _site_of(model, batch), _site_of(installed(model).check, batch),
            )  # fmt: skip
        return found

    for found in run_ranks(check, 2):
        assert found == {
            0: (None, (), None, "down"),
            1: (None, (), None, "down"),
            2: (None, (), "down", "down"),
        }


class Skipping(TwoLinears):
    """Its forward may skip a module."""

    skips = False

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return hidden.square().mean() if self.skips else self.down(hidden).square().mean()


def _skipping(mesh, **options):
    plan = Plan(mesh).redistribute("<in>", R, R).shard(r"down\.(weight|bias)", S0)
    plan.redistribute("down.<in>", R, R, grad_src=P, grad_dst=R)
    plan.redistribute("down.<out>", S1, R, grad_src=R)
    return parallelize(Skipping(), plan, mode="static", **options)


@pytest.mark.ranks
def test_a_site_that_a_later_step_skips_is_named():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        batch, errors = torch.randn(4, 4), []

        def call(model, skips):
            model.skips = skips
            try:
                model(batch)
            except StaticError as error:
                errors.append((error.site, str(error)))
            else:
                errors.append(None)

        guarded, not_guarded = _skipping(mesh), _skipping(mesh, guard_steps=0)
        for model in (guarded, not_guarded):
            call(model, False)
            call(model, True)
        with torch.no_grad():
            call(guarded, True)
        guarded.skips = True
        installed(guarded).check(batch)
        call(guarded, True)
        call(guarded, False)
        return errors

    for errors in run_ranks(check, 2):
        site, message = errors.pop(1)
        assert site == "down"
        assert (
            "than the first one: down.forward:<out>:0, down.forward_pre:<in>:0 missing. Its"
            in message
        )
        assert errors == [None] * 6  # not guarded; without gradients; validated; as the first


@pytest.mark.ranks
def test_a_check_changes_nothing_and_calls_without_gradients_are_not_validated():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = _branching(mesh)
        torch.manual_seed(0)
        batch = torch.randn(4, 4)
        model.centred = True
        with torch.no_grad():
            unguarded = _site_of(model, batch)
        guarded = _site_of(model, batch)
        model.centred = False
        model(batch).backward()
        bias = dict(model.named_parameters())["down.bias"].to_local().detach().zero_()
        state, calls = torch.get_rng_state(), model.calls.item()
        grads = [param.grad.to_local().clone() for param in model.parameters()]
        installed(model).check(batch)
        after = [param.grad.to_local() for param in model.parameters()]
        return (
            unguarded,
            guarded,
            torch.equal(state, torch.get_rng_state()),
            model.calls.item() == calls,
            all(map(torch.equal, grads, after)),
            not bias.any().item(),  # it was not zero during the comparison
        )

    assert run_ranks(check, 2) == [(None, "down", True, True, True, True)] * 2


class Gathering(TwoLinears):
    """Its code gathers DTensors, though the next module needs this rank's features only."""

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        if isinstance(hidden, DTensor):
            hidden = hidden.redistribute(placements=[R])
        return self.down(hidden).square().mean()


def _sharded(mesh):
    plan = Plan(mesh).redistribute("<in>", R, R).shard(r"up\.(weight|bias)", S0)
    plan.shard(r"down\.weight", S1).redistribute(r"down\.bias", R, P)
    plan.redistribute("up.<in>", R, R, grad_src=P, grad_dst=R)
    return plan.redistribute("down.<out>", P, R)


@pytest.mark.ranks
def test_collectives_that_eager_sends_besides_are_logged_with_their_module():
    """They are no error, as all values have Eager's bits."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = []
        with _logged() as messages:
            for make in (TwoLinears, Gathering):
                model = parallelize(make(), _sharded(mesh), mode="static")
                batch = torch.randn(4, 4, requires_grad=True)
                model(batch).sum().backward()
                found.append(installed(model).check(batch))
        return found, messages

    for (none, (difference,)), (message,) in run_ranks(check, 2):
        assert none == ()
        assert difference.only_collectives
        assert not difference.is_wrong
        assert str(difference) == (
            "the communication in the model: a step sends 0 all_gather of 0 bytes along 'tp', in "
            "Eager 1 of 128 bytes"
        )
        assert message.endswith(str(difference))


class GatheringBatch(TwoLinears):
    """Its code gathers the batch of DTensors, and shards it again."""

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        if isinstance(hidden, DTensor):
            before = hidden.placements
            hidden = hidden.redistribute(placements=[R, before[1]]).redistribute(placements=before)
        return self.down(hidden).square().mean()


@pytest.mark.ranks
def test_collectives_along_other_axes_than_that_of_overlap_are_compared():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = Plan(mesh)
        plan.redistribute("<in>", [R, R], [S0, R]).shard(r"up\.(weight|bias)", S0, "tp")
        plan.shard(r"down\.weight", S1, "tp").redistribute(r"down\.bias", R, P, "tp")
        plan.redistribute("up.<in>", R, R, "tp", grad_src=P, grad_dst=R)
        plan.redistribute("down.<out>", P, R, "tp").annotate(".*.grad", P, "dp")
        plan.redistribute("<out>", Partial("avg"), R, "dp")
        found = []
        for overlap in (None, "tp"):
            model = parallelize(
                GatheringBatch(), plan, mode="static", guard_steps=0, overlap=overlap
            )
            # Of few rows products have other last bits.
            differences = installed(model).check(torch.randn(4, 4))
            found.append([str(one) for one in differences if one.only_collectives])
        return found

    for unsplit, overlapped in run_ranks(check, 4):
        (of_batch,) = unsplit
        assert "a step sends 0 all_gather of 0 bytes along 'dp', in Eager" in of_batch
        assert overlapped == unsplit


@pytest.mark.ranks
def test_a_difference_on_one_rank_raises_on_all():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return [true_on_any_rank(mesh.get_rank() == wrong, mesh) for wrong in (None, 0, 1, 2, 3)]

    assert run_ranks(check, 4) == [[False, True, True, True, True]] * 4


@pytest.mark.ranks
def test_all_ranks_name_the_same_site():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        own = {1: "up", 2: "down"}.get(mesh.get_rank(), "")
        return first_site_on_any_rank(own, mesh), first_site_on_any_rank("", mesh)

    found = run_ranks(check, 4)
    assert found == [found[0]] * 4
    assert found[0][0] in ("up", "down")
    assert found[0][1] == ""


def test_check_without_static_mode_is_refused():
    with fake_mesh((2,), ("tp",)) as mesh:
        model = parallelize(TwoLinears(), Plan(mesh))
        with pytest.raises(ValueError, match="got one in Eager"):
            installed(model).check(torch.ones(4, 4))
