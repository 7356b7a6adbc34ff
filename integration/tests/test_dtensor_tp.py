"""Native tensor parallelism of every model: as far as its styles go, and as one device trains."""

import pytest

from integration.models import build_model, model_shape
from integration.systems import get_system
from testkit import run_ranks

MODELS = ("llama-tiny", "mixtral-tiny", "dit-tiny")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "model", [MODELS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:])]
)
def test_a_model_trains_as_one_device_does(model, train_runs, tmp_path):
    expected, found = (
        train_runs(ranks, [{"model": model, "system": system}], out=tmp_path / system)[0]
        for ranks, system in ((1, "single"), (2, "dtensor-tp"))
    )
    assert found == pytest.approx(expected, abs=model_shape(model).tolerance, rel=0)


def _shares(models):
    """Of every model: elements that this rank holds, elements in all, and what is whole."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    found = []
    for name in models:
        shape = model_shape(name)
        model = get_system("dtensor-tp").parallelize(
            build_model(shape, seed=0), shape, dist.get_world_size()
        )
        cut, whole = set(), set()
        for path, parameter in model.named_parameters():
            (cut if isinstance(parameter, DTensor) else whole).add(path)
        found.append((cut, whole))
    return found


@pytest.mark.ranks
def test_native_styles_shard_some_parameters_and_replicate_the_others():
    llama, mixtral, dit = run_ranks(_shares, 2, MODELS)[0]
    for cut, whole in (llama, mixtral):
        assert "model.layers.0.self_attn.q_proj.weight" in cut
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= cut
        assert "model.norm.weight" in whole
    assert "model.layers.1.mlp.down_proj.weight" in llama[0]
    experts = {path for path in mixtral[1] if ".mlp." in path}
    assert len(experts) == 2 * 3  # of each layer the router and two stacks of experts
    assert not any(".mlp." in path for path in mixtral[0])
    for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1"):
        assert f"model.blocks.1.{part}.weight" in dit[0]
    assert not any(".blocks." in path for path in dit[1] if path.endswith("weight"))
