"""Heads that an axis does not divide are refused before anything is sent, and no others."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from plan_api import Phase, Plan, lower, parallelize, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, fake_mesh, models, run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
THREE = {"hidden_size": 24, "num_attention_heads": 3}


class Attention(nn.Module):
    """3 heads of 4 features."""

    def __init__(self):
        super().__init__()
        self.head_dim = 4
        self.query = nn.Linear(6, 12)

    def forward(self, x):
        return self.query(x).view(*x.shape[:-1], -1, self.head_dim)


def queries(mesh, unit="head_dim"):
    return Plan(mesh).shard(r"query\.(weight|bias)", S0, "tp", unit=unit)


@pytest.mark.parametrize(
    ("plan", "make", "named"),
    [
        (
            zoo.llama,
            lambda: models.llama(**THREE, num_key_value_heads=3),
            r"model\.layers\.1\.self_attn\.k_proj\.weight is 3 times model\.layers\.1\.self_attn's",
        ),
        (
            zoo.mixtral,
            lambda: models.mixtral(**THREE, num_key_value_heads=3),
            r"model\.layers\.0\.self_attn\.q_proj\.weight is 3 times",
        ),
        (
            zoo.gpt2,
            lambda: models.gpt2(n_embd=24, n_head=3),
            r"dim 1 of transformer\.h\.0\.attn\.c_attn\.weight is 3 times .*attn's head_dim",
        ),
        (zoo.vit, lambda: models.vit(**THREE), r"\.attention\.v_proj\.bias is 3 times"),
        (
            lambda mesh: Plan.from_tp_plan(models.llama(), mesh),
            lambda: models.llama(**THREE, num_key_value_heads=3),
            r"self_attn\.v_proj\.weight is 3 times",
        ),
    ],
    ids=["llama", "mixtral", "gpt2", "vit", "from_tp_plan"],
)
def test_the_error_names_module_heads_and_axis(mesh, plan, make, named):
    with pytest.raises(ValueError, match=rf"(?s){named}.*axis 'tp' of size 2 does not divide 3"):
        lower(plan(mesh), make())


def test_key_value_heads_that_do_not_divide_are_refused_alone():
    """4 heads on 4 ranks, 2 key-value heads: two matrices of two layers."""
    with fake_mesh((4,), ("tp",)) as mesh:
        with pytest.raises(ValueError, match="is 2 times") as caught:
            lower(zoo.llama(mesh), models.llama())
        pattern = str(caught.value).splitlines()[1:]
        assert len(pattern) == 4
        assert not any("q_proj.weight is" in line for line in pattern)


@pytest.mark.ranks
def test_undivided_heads_are_refused_without_communication():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = models.llama(**THREE, num_key_value_heads=3)
        if mesh.get_rank() == 0:  # what the other one would wait for, if it sent something
            with pytest.raises(ValueError, match="does not divide 3"):
                parallelize(model, zoo.llama(mesh))
        return type(model.model.layers[0].self_attn.q_proj.weight) is nn.Parameter

    assert run_ranks(check, 2) == [True, True]


@pytest.mark.ranks
@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
def test_divided_heads_train_as_on_one_device():
    """Whole key-value heads, one of them, and cut ones that are gathered train as on one device."""

    def llama(heads):
        return models.llama(num_key_value_heads=heads, **THREE | {"num_attention_heads": 6})

    def whole(plan):
        return plan.shard(r".*\.(k|v)_proj\.weight", R, "tp")

    def gathered(plan):
        return plan.shard(r".*\.(k|v)_proj.<out>", R, "tp")

    def run(plan):
        return plan.shard(r".*\.(k|v)_proj\.weight", R, "tp", Phase.RUN)

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plans = [
            (3, whole(zoo.llama(mesh))),
            (3, gathered(zoo.llama(mesh))),
            (3, run(zoo.llama(mesh))),
            (1, zoo.llama(mesh)),
        ]
        return [models.train(parallelize(llama(heads), plan), steps=3) for heads, plan in plans]

    three, one = models.train(llama(3), steps=3), models.train(llama(1), steps=3)
    for found in run_ranks(check, 2, timeout=120):
        for losses, expected in zip(found, [three, three, three, one], strict=True):
            assert losses == pytest.approx(expected, abs=1e-5, rel=0)


def test_a_module_on_local_tensors_is_not_checked(mesh):
    plan = queries(mesh).local("", Shard(1), "tp")
    assert len(lower(plan, Attention()).ops) == 3


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        ("head_dim", r"dim 0 of query\.bias is 3 times the model's head_dim \(4\), and axis 'tp'"),
        (4, r"query\.weight is 3 times 4, and axis 'tp' of size 2 does not divide 3"),
        (5, r"dim 0 of query\.weight has size 12, which is no multiple of 5"),
        ("heads_dim", "integer attribute of query or a module above it, got 'heads_dim'"),
    ],
)
def test_a_unit_is_a_size_or_an_attribute(mesh, unit, message):
    with pytest.raises(ValueError, match=rf"(?s)test_validate_units\.py:\d+: shard\(.*{message}"):
        lower(queries(mesh, unit), Attention())


def test_shards_between_units_are_accepted(mesh):
    model = parallelize(Attention(), queries(mesh, 2).shard("<in>", R, "tp"), src_data_rank=None)
    assert model.query.weight.to_local().shape == (6, 6)
    # What it would have come to; the second are the words of torch 2.11.
    pattern = r"not evenly divisible|Attempted to split the sharded dim"
    with pytest.raises(RuntimeError, match=pattern):
        model(torch.ones(2, 6))


def test_axes_that_shard_one_dim_are_multiplied(mesh):
    """6 units of 2 can be cut along each of two axes of size 2, and not along both."""
    plan = Plan(mesh).shard(r"query\.weight", [S0, S0], unit=2)
    with pytest.raises(ValueError, match="axes 'dp' of size 2 and 'tp' of size 2 do not divide 6"):
        lower(plan, Attention())


def test_axes_that_replicate_or_gather_are_left_out(mesh):
    """What rests in halves and runs whole (ZeRO-3), beside tensor parallelism that is gathered."""
    plan = Plan(mesh).shard(r"query\.weight", [S0, S0], unit="head_dim")
    plan.shard(r"query\.weight", R, "dp", Phase.RUN)
    with pytest.raises(ValueError, match="axis 'tp' of size 2 does not divide 3"):
        lower(plan, Attention())
    lower(plan.shard("query.<out>", R, "tp"), Attention())


def test_unit_is_for_parameters_and_is_serialized(mesh):
    with pytest.raises(ValueError, match=r"shard\('<in>', unit=\): only parameters have units"):
        Plan(mesh).shard("<in>", S0, "tp", unit="head_dim")
    plan = queries(mesh) | queries(mesh, 4)
    assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries
    assert ", unit='head_dim')" in str(plan)


def test_units_are_any_integer_type():
    with fake_mesh((2,), ("tp",)) as mesh:
        plan = queries(mesh, unit=np.int64(4))
        assert '"unit": 4' in plan.to_json()
        model = Attention()
        model.head_dim = np.int64(4)
        for unit in (np.int64(4), "head_dim"):
            with pytest.raises(ValueError, match="weight is 3 times"):
                parallelize(model, queries(mesh, unit=unit))


def test_axes_and_replicas_are_any_integer_type():
    with fake_mesh((4,), ("dp",)) as mesh:
        by_name = Plan(mesh).shard("weight", S0, "dp").fully_shard("", "dp", replicate=2)
        number = np.int64
        by_number = Plan(mesh).shard("weight", S0, number(0))
        by_number.fully_shard("", number(-1), replicate=number(2))
        for one, other in zip(by_name.entries, by_number.entries, strict=True):
            assert (one.axes, dict(one.options)) == (other.axes, dict(other.options))
        assert '"replicate": 2' in by_number.to_json()
        with pytest.raises(ValueError, match=r"not 0\.5"):
            Plan(mesh).shard("weight", S0, [0.5])
