"""Which routers a model has, and how ranks share their tokens."""

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from plan_api import Plan, lower, zoo
from plan_api.ops.routers.tokens import router_tokens, routers_of
from testkit import models


@pytest.mark.parametrize("make", [models.mixtral, models.qwen3_moe, models.gpt_oss])
def test_every_layer_of_experts_has_a_router(make):
    assert [*routers_of(make())] == [
        f"model.layers.{layer}.mlp.{'router' if make is models.gpt_oss else 'gate'}"
        for layer in range(2)
    ]


def test_dense_layers_have_none():
    assert [*routers_of(models.deepseek_v3())] == ["model.layers.1.mlp.gate"]
    assert not routers_of(models.llama())
    assert not routers_of(nn.Linear(2, 2))


def _sharding(plan, mesh):
    lowered = lower(plan, models.mixtral())
    names = mesh.mesh_dim_names
    return {names[axis] for axis in router_tokens(lowered.sites, lowered.indices, mesh).sharding}


def test_tokens_are_sharded_by_inputs_losses_and_dispatch(mesh):
    whole = Plan(mesh).shard("<in:input_ids>", [Replicate()] * 2)
    assert _sharding(whole, mesh) == set()
    assert _sharding(Plan(mesh).shard("<in:input_ids>", Shard(0), "dp"), mesh) == {"dp"}
    assert _sharding(Plan(mesh).annotate("<in:input_ids>", Shard(0), "dp"), mesh) == {"dp"}
    assert _sharding(Plan(mesh).annotate("<in:inputs_embeds>", Shard(1), "tp"), mesh) == set()
    assert _sharding(Plan(mesh).shard("<in:inputs_embeds>", Shard(1), "tp"), mesh) == {"tp"}
    assert _sharding(zoo.mixtral(mesh, sp=True, ep="tp"), mesh) == {"tp"}
    assert _sharding(zoo.mixtral(mesh, dp="dp", sp=True, ep="tp"), mesh) == {"dp", "tp"}
    assert _sharding(zoo.mixtral(mesh, dp="dp", sp=True), mesh) == {"dp"}
