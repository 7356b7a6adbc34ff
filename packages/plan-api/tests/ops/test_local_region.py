"""Modules on local tensors, tensors that forward makes, and the fsdp package by entry point."""

import importlib
import sys
from importlib.metadata import EntryPoints

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import Phase, Plan, lower, parallelize
from plan_api.spec import fully_shard_package
from testkit import models, run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


class Experts(nn.Module):
    """Loops over those that are chosen: their number depends on the data."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 4))
        self.down = nn.Parameter(torch.randn(4, 4, 6))

    def forward(self, x, chosen, *, weights):
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            (rows,) = torch.where(chosen == expert)
            hidden = torch.tanh(x[rows] @ self.up[expert].t())
            out = out.index_add(0, rows, (hidden @ self.down[expert].t()) * weights[rows])
        return out


class Routed(nn.Module):
    """A router, experts, and a mask that forward makes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(4, 4), Experts()

    def forward(self, x):
        scores = torch.softmax(self.router(x), -1)
        chosen = scores.argmax(-1, keepdim=True)
        weights = scores.gather(-1, chosen)
        mask = torch.arange(4) < 3
        return self.experts(x * mask, chosen.squeeze(-1), weights=weights) + torch.full((4,), 0.5)


def plan_of(mesh):
    return (
        Plan(mesh)
        .shard("<in>", S0, "dp")
        .factory("", R, "dp")
        .shard(r"experts\.up", S1, "tp")
        .shard(r"experts\.down", Shard(2), "tp")
        .local("experts", P, "tp")
        .shard("experts.<out>", R, "tp")
        .shard("<out>", [R, R])
    )


def train(model, rows):
    return models.train(
        model, lambda model: model(torch.randn(rows, 4)).square().mean(), steps=4, lr=1e-2
    )


@pytest.mark.ranks
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=str)
def test_experts_in_a_loop_train_as_on_one_device(shape, rows):
    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        return train(parallelize(Routed(), plan_of(mesh)), rows)

    expected = train(Routed(), rows)
    for losses in run_ranks(check, shape[0] * shape[1], timeout=120):
        assert losses == pytest.approx(expected, abs=1e-6)


def test_a_region_gets_plain_tensors_and_keeps_its_parameters(mesh):
    seen = []

    class Inner(nn.Linear):
        def forward(self, x):
            seen.append((type(self.weight), type(x)))
            return super().forward(x)

    model = nn.Sequential(Inner(4, 4))
    parallelize(model, Plan(mesh).shard(r"0\.(weight|bias)", S0, "tp").local("0", S1, "tp"))
    out = model(torch.randn(3, 4))
    assert seen == [(torch.Tensor, torch.Tensor)]
    assert (out.shape, out.placements) == ((3, 4), (R, S1))
    assert isinstance(model[0].weight, DTensor)


def test_a_region_that_raises_restores_the_model(mesh):
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize(model, Plan(mesh).local("0", R, "tp"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(3, 5))
    assert isinstance(model[0].weight, DTensor)


def test_a_partial_input_of_a_region_is_refused(mesh):
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    plan = Plan(mesh).annotate("0.<in>", P, "tp").local("1", R, "tp")
    with pytest.raises(ValueError, match=r"1 runs on local .* no Partial input.*add shard\('1"):
        parallelize(model, plan)(torch.randn(3, 4))


@pytest.mark.parametrize(
    "add",
    [
        lambda plan: plan.shard("layers.0.up.<out>", R, "tp"),
        lambda plan: plan.shard("layers.0.up.weight", S0, "dp", Phase.OPTIM),
        lambda plan: plan.local("layers.0.up", R, "tp"),
    ],
)
def test_redistribution_inside_a_region_is_refused(mesh, model, add):
    with pytest.raises(ValueError, match=r"is inside of 'layers\.0', which runs on local tensors"):
        lower(add(Plan(mesh).local("layers.0", R, "tp")), model)


@pytest.mark.parametrize("verb", ["factory", "local"])
def test_factory_and_local_take_paths_of_modules(mesh, model, verb):
    with pytest.raises(ValueError, match=r"'layers\.0\.<in>' has to name modules"):
        getattr(Plan(mesh), verb)("layers.0.<in>", R, "tp")
    with pytest.raises(ValueError, match=r"no module has this name; did you mean 'layers\.\d\.up'"):
        lower(getattr(Plan(mesh), verb)("layers.0.upp", R, "tp"), model)


class Making(nn.Module):
    """Makes tensors itself, and in what it calls."""

    def forward(self, x):
        torch.manual_seed(1)
        made = [torch.zeros(4, 2), torch.arange(6), torch.rand(4, 3), torch.tensor(2.0)]
        return made, torch.ones(3, device="meta"), torch.zeros_like(x)


def test_tensors_created_in_forward_are_placed(mesh):
    outer = nn.Sequential(Making())
    parallelize(outer, Plan(mesh).factory("", S0, "tp"))
    made, elsewhere, like = outer(torch.ones(2))
    assert [one.placements for one in made] == [(R, S0)] * 3 + [(R, R)]
    torch.manual_seed(1)
    assert torch.equal(made[2].to_local(), torch.rand(4, 3)[:2])
    assert not isinstance(elsewhere, DTensor)
    assert not isinstance(like, DTensor)
    assert not isinstance(torch.zeros(2), DTensor)


def test_the_factory_of_the_innermost_module_applies(mesh):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Making()

        def forward(self, x):
            return self.inner(x)[0][0], torch.zeros(4, 2)

    outer = Outer()
    parallelize(outer, Plan(mesh).factory("", R, "tp").factory("inner", S0, "tp"))
    inside, outside = outer(torch.ones(2))
    assert inside.placements == (R, S0)
    assert outside.placements == (R, R)


def test_without_fsdp_the_error_names_it(mesh, model, monkeypatch, tmp_path):
    # The environment of all packages has it, and it is looked for once for each path.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fully_shard_package, "entry_points", lambda group: EntryPoints())
    with pytest.raises(ModuleNotFoundError, match="pip install fsdp"):
        lower(Plan(mesh).fully_shard(r"layers\.\d", "dp"), model)


@pytest.mark.parametrize(
    ("axes", "copies", "flat"),
    [("dp", 3, False), ("dp", 0, False), (("dp", "tp"), 2, False), (("dp", "tp"), 3, True)],
)
def test_replicas_that_do_not_divide_the_ranks_are_refused(mesh, model, axes, copies, flat):
    with pytest.raises(ValueError, match=rf"expected replicate= on .* got {copies} on axes"):
        lower(Plan(mesh).fully_shard(r"layers\.\d", axes, replicate=copies, flat=flat), model)


def test_fully_shard_is_found_by_entry_point_and_applied_innermost_first(mesh, model, tmp_path):
    """A package that is installed as others are: metadata beside a module."""
    (tmp_path / "some_fsdp.py").write_text(
        "import dataclasses\n"
        "calls = []\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Size:\n    n: int = 1\n"
        "def fully_shard(module, **options):\n"
        "    fn = options.pop('shard_placement_fn', lambda param: None)\n"
        "    calls.append((module, options, {fn(param) for param in module.parameters()}))\n"
        "fully_shard.granularities = (Size,)\n"
    )
    info = tmp_path / "some_fsdp-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-fsdp\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[plan_api.fully_shard]\nfully_shard = some_fsdp:fully_shard\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        plan = Plan(mesh).shard("<in>", [R, R]).fully_shard("", "dp")
        size = importlib.import_module("some_fsdp").Size(3)
        plan.fully_shard(r"layers\.[01]", "dp", size, False, replicate=2)
        assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries
        parallelize(model, plan)
        calls = sys.modules["some_fsdp"].calls
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("some_fsdp", None)
    assert [module for module, *_ in calls] == [model.layers[0], model.layers[1], model]
    copies = calls[0][1]["mesh"]
    assert (copies.mesh_dim_names, copies.shape) == (("dp_replicate", "dp_shard"), (2, 1))
    inner = {"mesh": copies, "reshard_after_forward": False}
    assert calls[0][1:] == calls[1][1:] == (inner, {size})
    assert calls[1][1]["mesh"] is copies, "its process groups are made once"
    assert calls[2][1:] == ({"mesh": mesh["dp"], "reshard_after_forward": None}, {None})
    model(torch.randn(2, 4)).sum().backward()
    assert model.layers[2].down.weight.grad is not None  # nobody's to reduce but fsdp's
