"""Modules whose own code redistributes: on DTensors, and on local tensors in both modes."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from plan_api import (
    Plan,
    StaticError,
    generate_static,
    installed,
    parallelize,
    plan_communication,
    redistribute,
    track,
    typecheck,
)
from testkit import CommLog, fake_mesh, models, run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


class Mlp(nn.Module):
    """A column and a row parallel Linear, with Megatron-LM's f and g between them."""

    def __init__(self, mesh):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
        self.mesh = mesh

    def forward(self, x):
        return self.reduced(self.down(torch.tanh(self.up(self.shared(x)))))

    def shared(self, x):
        return redistribute(x, R, R, self.mesh, grad_src=P, grad_dst=R)

    def reduced(self, x):
        return redistribute(x, P, R, self.mesh)


class OneDevice(Mlp):
    """The same without communication."""

    def shared(self, x):
        return x

    reduced = shared


class SequenceParallel(Mlp):
    """Gathers a sharded batch, and scatters the sum."""

    def shared(self, x):
        return redistribute(redistribute(x, R, S0, self.mesh), S0, R, self.mesh, grad_src=P)

    def reduced(self, x):
        return redistribute(redistribute(x, P, S0, self.mesh), S0, R, self.mesh, grad_src=R)


class BySpmdTypes(Mlp):
    """The same as `Mlp` by another package, whose collectives take plain tensors only."""

    def shared(self, x):
        import spmd_types as spmd

        return spmd.convert(x, self.mesh.get_group(), src=spmd.I, dst=spmd.R)

    def reduced(self, x):
        import spmd_types as spmd

        return spmd.all_reduce(x, self.mesh.get_group(), dst=spmd.I)


class Recomputed(Mlp):
    """The same as `Mlp`, with activation checkpointing."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Model(nn.Module):
    """A norm, and a block that communicates."""

    def __init__(self, make, mesh=None):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mlp = nn.LayerNorm(4), make(mesh)

    def forward(self, x):
        return (x + self.mlp(self.norm(x))).square().mean()


def weights(mesh):
    plan = Plan(mesh).redistribute("<in>", R, R, "tp").shard(r"mlp\.up\.(weight|bias)", S0, "tp")
    return plan.shard(r"mlp\.down\.weight", S1, "tp")


def in_region(mesh):
    """Its code reduces the gradient of its input itself."""
    plan = weights(mesh).local("mlp", R, "tp")
    return plan.redistribute("mlp.<in>", R, R, "tp", grad_src=R, grad_dst=R)


def train(model):
    """Returns the losses of steps of AdamW, and the gradients of one more, as it hides factors."""
    losses = models.train(model, lambda model: model(torch.randn(4, 4)))
    model(torch.randn(4, 4)).backward()
    found = [tensor for param in model.parameters() for tensor in (param.detach(), param.grad)]
    return losses, [one.full_tensor() if isinstance(one, DTensor) else one for one in found]


CASES = {
    "on DTensors": (Mlp, weights, "eager"),
    "in a region": (Mlp, in_region, "eager"),
    "static": (Mlp, weights, "static"),
    "static, as a region in Eager": (Mlp, in_region, "static"),
    "static, generated": (Mlp, weights, "static"),
    "sequence parallel": (SequenceParallel, weights, "eager"),
    "sequence parallel, static": (SequenceParallel, weights, "static"),
    "sequence parallel, static, generated": (SequenceParallel, weights, "static"),
    "recomputed": (Recomputed, weights, "eager"),
    "recomputed, static": (Recomputed, weights, "static"),
    "spmd_types": (BySpmdTypes, in_region, "eager"),
    "spmd_types, static": (BySpmdTypes, in_region, "static"),
    "spmd_types, static, generated": (BySpmdTypes, in_region, "static"),
}


REFERENCE = "on DTensors"
FAST = (REFERENCE, "in a region", "static", "static, generated", "spmd_types, static")
SLOW = (REFERENCE, *(name for name in CASES if name not in FAST))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, id="fast"),
        pytest.param(SLOW, id="more", marks=pytest.mark.slow),
    ],
)
def test_modules_that_communicate_train_as_on_one_device_in_both_modes(names):
    """Static mode is compared with Eager in the first step, collectives included."""

    def check():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        found = {}
        for name in names:
            make, plan, mode = CASES[name]
            written = plan(mesh)
            if "generated" in name:
                written = generate_static(
                    written, Model(make, mesh["tp"]), (torch.randn(4, 4),), use=()
                )
            model = parallelize(Model(make, mesh["tp"]), written, mode=mode, use=())
            differences = () if mode == "eager" else installed(model).check(torch.randn(4, 4))
            found[name] = (*train(model), differences, installed(model).lowered.eager)
        return found

    pytest.importorskip("spmd_types")
    losses, params = train(Model(OneDevice))
    for found in run_ranks(check, 2):
        assert found.keys() == set(names)
        reference, reference_params, *_ = found[REFERENCE]
        assert reference == pytest.approx(losses, abs=1e-6)
        assert all(map(torch.allclose, reference_params, params))
        for name, (losses_there, params_there, differences, on_dtensors) in found.items():
            assert losses_there == reference, name
            assert all(map(torch.equal, params_there, reference_params)), name
            assert differences == on_dtensors == (), name


class Normed(Mlp):
    """Gathers its input for a norm, whose gradient is therefore that of one device."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.norm = nn.LayerNorm(4)

    def shared(self, x):
        gathered = redistribute(x, S0, R, self.mesh, grad_src=R)
        return super().shared(self.norm(gathered))


@pytest.mark.ranks
def test_a_plan_says_how_the_gradients_of_a_module_on_local_tensors_are_placed():
    """By default it takes those of its norm for Partial, as its input is sharded."""

    def check():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        sharded = weights(mesh).redistribute("mlp.<in>", R, S0, "tp")
        local = sharded | Plan(mesh).local("mlp", R, "tp")
        annotated = local | Plan(mesh).annotate(r"mlp\.norm\.(weight|bias).grad", R, "tp")
        return [
            train(parallelize(Model(Normed, mesh["tp"]), plan, use=()))
            for plan in (sharded, local, annotated)
        ]

    for (_, expected), (_, by_default), (_, annotated) in run_ranks(check, 2):
        assert not all(map(torch.equal, by_default, expected))
        assert all(map(torch.equal, annotated, expected))


@pytest.fixture
def mesh():
    with fake_mesh((1, 2), ("dp", "tp")) as mesh:
        yield mesh


X = torch.arange(16.0).view(4, 4) ** 2


def test_both_modes_send_what_the_code_asks_for_and_track_names_its_line(mesh):
    """An all-reduce forward and one in backward; generated plans add none."""
    generated = generate_static(weights(mesh), Model(Mlp, mesh["tp"]), (X,), fake=True)
    planned = plan_communication(weights(mesh), Model(Mlp, mesh["tp"]), (X,))
    assert planned.entries == generated.entries == weights(mesh).entries
    found = {}
    for mode in ("eager", "static"):
        steps = 0 if mode == "static" else None
        model = parallelize(
            Model(Mlp, mesh["tp"]), weights(mesh), mode=mode, guard_steps=steps, use=()
        )
        with track(model) as record:
            model(X).backward()
        found[mode] = [
            (one.name, one.axis, one.bytes, one.site, one.line)
            for one in record.collectives
            if one.cause == "redistribute"
        ]
    assert found["eager"] == found["static"]
    assert [one[:4] for one in found["static"]] == [("all_reduce", "tp", 64, "mlp")] * 2
    lines = [int(one[4].removeprefix("test_redistribute.py:")) for one in found["static"]]
    first = Mlp.reduced.__code__.co_firstlineno, Mlp.shared.__code__.co_firstlineno
    assert lines == [one + 1 for one in first]


@pytest.mark.parametrize("make", [Mlp, SequenceParallel, BySpmdTypes])
def test_types_accept_code_that_communicates(mesh, make):
    pytest.importorskip("spmd_types")
    typecheck(weights(mesh), Model(make, mesh["tp"]), (X,))


def test_types_refuse_code_that_does_not_reduce(mesh):
    pytest.importorskip("spmd_types")
    with pytest.raises(StaticError, match="expected no tensor of type I"):
        typecheck(weights(mesh), Model(OneDevice), (X,))


def dtensor(mesh, *placements):
    return DTensor.from_local(X, mesh, placements, run_check=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mesh: redistribute(X, P, R, "tp"), r"expected a DeviceMesh.*got a str"),
        (lambda mesh: redistribute(X, P, 0, mesh["tp"]), r"did you mean Shard\(0\)"),
        (lambda mesh: redistribute(X, None, R, mesh["tp"]), "got None"),
        (lambda mesh: redistribute(X, [P, R], R, mesh["tp"]), "2 placements for 1 axes"),
        (lambda mesh: redistribute(X, S0, R, mesh["tp"]), r"add grad_src=Partial\(\)"),
        (lambda mesh: redistribute(X, S0, P, mesh["tp"]), r"cannot redistribute S\(0\) to P"),
        (
            lambda mesh: redistribute(dtensor(mesh, R, R), P, R, mesh["tp"]),
            r"redistribute:test_redistribute.py:\d+ is R along 'tp', and the call says P",
        ),
        (
            lambda mesh: redistribute(dtensor(mesh["dp"], R), P, R, mesh["tp"]),
            "is no sub-mesh of",
        ),
        (
            lambda mesh: redistribute(torch.ones(3), R, S0, mesh["tp"]),
            "a dim 0 that 2 ranks divide, got one of 3",
        ),
    ],
    ids=range(9),
)
def test_wrong_calls_are_refused_before_anything_is_sent(mesh, call, message):
    with CommLog() as log, pytest.raises(ValueError, match=message):
        call(mesh)
    assert log.calls == ()


def test_other_axes_of_a_dtensor_stay(mesh):
    moved = redistribute(dtensor(mesh, S1, P), P, S0, mesh["tp"])
    assert moved.placements == (S1, S0)
    both = redistribute(dtensor(mesh, S1, P), [S1, P], [R, R], mesh)
    assert both.placements == (R, R)


def test_an_equal_mesh_with_other_process_groups_is_not_confused():
    with fake_mesh((2, 2), ("dp", "tp")) as first:
        second = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert first == second
        groups = [mesh["tp"].get_group().group_name for mesh in (first, second)]
        with CommLog() as log:
            for mesh in (first, second):
                redistribute(X, P, R, mesh["tp"])
        assert groups[0] != groups[1]
        assert [call.group for call in log.calls] == groups


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo reads it
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_the_graph_of_a_compiled_module_breaks_at_the_call(mesh, mode):
    model = parallelize(
        Model(Mlp, mesh["tp"]), weights(mesh), mode=mode, use=(),
        guard_steps=0 if mode == "static" else None,
    )  # fmt: skip
    expected = model(X)
    model.mlp.compile(backend="eager")
    with CommLog() as log:
        actual = model(X)
    assert log.counts() == {"all_reduce": 1}
    assert torch.equal(actual, expected)  # of DTensors it is a collective, too
