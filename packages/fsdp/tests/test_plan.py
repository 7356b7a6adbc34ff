"""The entry point that plan-api calls."""

from importlib.metadata import EntryPoint, distribution

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FSDPModule
from fsdp.plan import fully_shard
from testkit import run_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("granularity", "unit"),
    [(None, 1), ("rows(2)", 10), ("Block(4)", 4), ("whole", 15), ("rows", 5)],
)
def test_granularity_applies_to_all_parameters(granularity, unit):
    def check():
        model = nn.Linear(5, 3, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), granularity=granularity)
        assert isinstance(model, FSDPModule)
        return model.weight.to_local().numel()

    first, second = run_ranks(check, 2)
    assert first + second == 15
    assert first % unit == 0


def test_ignored_params_are_not_sharded():
    def check():
        model = nn.Linear(5, 3)
        bias = model.bias
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=[bias])
        assert model.bias is bias
        assert model.weight is not bias
        assert model.weight.to_local().numel() < 15

    run_ranks(check, 2)


def test_unknown_granularity_is_refused():
    def check():
        with pytest.raises(ValueError, match=r"expected granularity='rows\(n\)'.* got 'columns'"):
            fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)), granularity="columns")

    run_ranks(check, 1)


def test_entry_point_is_declared_and_loads():
    import tomllib
    from pathlib import Path

    declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    value = declared["project"]["entry-points"]["plan_api.fully_shard"]["fsdp"]
    assert EntryPoint("fsdp", value, "plan_api.fully_shard").load() is fully_shard
    assert distribution("fsdp").name == "fsdp"
