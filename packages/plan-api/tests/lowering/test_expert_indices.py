"""Indices into parameters that are divided: which numbers are a rank's own, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import Plan, explain, lower, parallelize, zoo
from testkit import TORCH_RELEASE, fake_mesh, models, run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


class Experts(nn.Module):
    """Adds the rows of a table that are chosen, and leaves out one number more than there are."""

    def __init__(self, number=5):
        super().__init__()
        self.table, self.number = nn.Parameter(torch.randn(number, 4)), number
        self.knows, self.seen = False, None

    def forward(self, x, chosen=None):
        self.seen = (chosen, self.number, self.knows, tuple(self.table.shape))
        if chosen.max() > self.number:
            raise IndexError("no such row")
        rows = torch.cat([self.table, torch.zeros(1, 4)])
        return x * rows[chosen]


def plan_of(mesh, **options):
    options = {"count": "number", "flag": "knows"} | options
    plan = Plan(mesh).shard("table", S0, "tp").local("", P, "tp")
    return plan.index("<in:chosen>", S0, "tp", **options)


CHOSEN = torch.tensor([4, 0, 2, 3, 1])


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by place"])
@pytest.mark.parametrize(
    ("rank", "own", "number"), [(0, [3, 0, 2, 3, 1], 3), (1, [1, 2, 2, 0, 2], 2)]
)
def test_other_ranks_experts_get_the_size_of_the_shard(by_name, rank, own, number):
    with fake_mesh((2,), ("tp",), rank=rank) as mesh:
        model = parallelize(Experts(), plan_of(mesh), src_data_rank=None)
        table = model.table
        given = {"chosen": CHOSEN} if by_name else {}
        out = model(torch.ones(5, 4), *(() if by_name else (CHOSEN,)), **given)
        seen, *rest = model.seen
        assert seen.tolist() == own
        assert rest == [number, True, (number, 4)]
        assert out.placements == (P,)
        assert (model.number, model.knows, model.table) == (5, False, table)


def test_experts_sharded_along_several_axes_are_renumbered():
    """Of 7 along 2 and then 2: 2 and 2, 2 and 1."""
    found = []
    for rank in range(4):
        with fake_mesh((2, 2), ("dp", "tp"), rank=rank) as mesh:
            plan = Plan(mesh).shard("table", [S0, S0]).local("", [P, P])
            plan.index("<in:chosen>", [S0, S0], ("tp", "dp"))  # in any order
            (index,) = lower(plan, Experts(7)).indices[""]
            found.append([*index.own])
            local = parallelize(Experts(7), plan, src_data_rank=None).table.to_local()
            assert len(local) == len(index.own)
            assert index.attributes == {}
    assert found == [[0, 1], [2, 3], [4, 5], [6]]


def test_invalid_indices_get_the_size_of_the_shard():
    with fake_mesh((2,), ("tp",), rank=1) as mesh:
        model = parallelize(Experts(), plan_of(mesh), src_data_rank=None)
        model(torch.ones(3, 4), torch.tensor([-1, 5, 9]))
        assert model.seen[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_an_argument_without_integers_is_refused(mesh, dtype):
    model = parallelize(Experts(), plan_of(mesh))
    with pytest.raises(ValueError, match=rf"expected a tensor of integers.*got {dtype}") as raised:
        model(torch.ones(2, 4), torch.ones(2).to(dtype))
    assert "at the model, for entry 2 of the plan (test_expert_indices.py:" in str(raised.value)


def test_attributes_are_restored_after_an_error(mesh):
    model = parallelize(Experts(), plan_of(mesh))
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(torch.ones(3, 3), torch.tensor([0, 1, 2]))
    assert (model.number, model.knows) == (5, False)
    assert isinstance(model.table, DTensor)


def test_sharded_inputs_are_refused_where_experts_are_sharded(mesh):
    model = parallelize(Experts(), plan_of(mesh).shard("<in>", S0, "tp"))
    with pytest.raises(ValueError, match=r"sharded along 'tp'.*add shard\('.*Replicate\(\), 'tp'"):
        model(torch.ones(4, 4), CHOSEN[:2])


def test_index_is_explained_and_serialized(mesh):
    plan = plan_of(mesh)
    assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries
    assert str(plan).splitlines()[-1] == (
        "index('<in:chosen>', tp=S(0), count='number', flag='knows')"
    )
    rows = {(row.hook, row.tensor): row.after for row in explain(plan, Experts()).rows}
    assert rows == {
        ("init", "table"): "tp=S(0)",
        ("forward_pre", "<index>:1"): "tp=S(0)",
        ("forward", "<out>:0"): "tp=P",
    }
    assert "forward_pre:<index>:1:index(->S(0), tp)" in map(str, lower(plan, Experts()).ops)


class Biased(Experts):
    """Has a second parameter with a row each."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))


@pytest.mark.parametrize(
    ("change", "make", "message"),
    [
        (lambda plan: plan.shard("table", R, "tp"), Experts, "all of one size, got: none"),
        (lambda plan: plan.shard("table", S0, "dp"), Experts, "all of one size, got: none"),
        (lambda plan: plan, Biased, r"dim 0 of bias has size 5 too, and is not sharded .* table"),
        (lambda plan: plan, lambda: Experts(1), "at least one of 1 on each rank"),
        (
            lambda plan: plan.index("<in:chosen>", S0, "tp", count="rows"),
            Experts,
            "Experts has no attribute 'rows'",
        ),
        (
            lambda plan: plan.index("<in:chosen>", S0, "tp", flag="aware"),
            Experts,
            "Experts has no attribute 'aware'",
        ),
        (
            lambda plan: plan.index("<in:chosen>", S0, "tp", count="knows"),
            Experts,
            "number of experts, 5, got 'knows', which is False",
        ),
        (lambda plan: plan.index("<in:choice>", S0, "tp"), Experts, "did you mean 'chosen'"),
    ],
)
def test_entries_that_do_not_fit_the_module_are_refused(mesh, change, make, message):
    with pytest.raises(ValueError, match=rf"(?s)test_expert_indices\.py:\d+: index\(.*{message}"):
        lower(change(plan_of(mesh)), make())


def test_a_module_on_dtensors_is_refused(mesh):
    plan = Plan(mesh).shard("table", S0, "tp").index("<in:chosen>", S0, "tp")
    with pytest.raises(ValueError, match=r"add local\('', Partial\(\), 'tp'\)"):
        lower(plan, Experts())


@pytest.mark.parametrize("placement", [R, P, [S0, S1]], ids=str)
def test_placements_are_shards_of_one_dim(mesh, placement):
    with pytest.raises(ValueError, match="expected one Shard of the module's parameters"):
        Plan(mesh).index("<in:chosen>", placement)


@pytest.mark.parametrize("path", ["", "table", "<out>"])
def test_other_paths_than_arguments_are_refused(mesh, path):
    with pytest.raises(ValueError, match=r"expected an argument|names nothing"):
        Plan(mesh).index(path, S0, "tp")


def test_more_ranks_than_experts_are_refused(mesh):
    with pytest.raises(ValueError, match="at least one of 1 on each rank"):
        lower(
            zoo.mixtral(mesh, ep="tp"), models.mixtral(num_local_experts=1, num_experts_per_tok=1)
        )


@pytest.mark.ranks
@pytest.mark.skipif(
    TORCH_RELEASE < (2, 12),
    reason="torch 2.11's topk of a DTensor has no backward",
)
@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_experts_implementation_of_transformers_matches_one_device(number):
    """3 on 2 ranks: 2 and 1; its grouped_mm leaves memory unset where it is not told of others."""

    def make(way):
        model = models.mixtral(num_local_experts=number)
        model.set_experts_implementation(way)
        return model

    def check(ways):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        plan = zoo.mixtral(mesh, tp=None, ep="ep")
        found = []
        for way in ways:
            model = parallelize(make(way), plan)
            shape = model.model.layers[0].mlp.experts.down_proj.to_local().shape
            found.append((models.train(model, steps=5), shape[0]))
        return found

    ways = ("eager", "batched_mm", "grouped_mm")
    expected = [models.train(make(way), steps=5) for way in ways]
    for rank, found in enumerate(run_ranks(check, 2, ways, timeout=120)):
        for (losses, own), alone in zip(found, expected, strict=True):
            assert losses == pytest.approx(alone, abs=1e-5, rel=0)
            assert own == (1 if number == 2 else 2 - rank)
