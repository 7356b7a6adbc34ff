"""The load of experts in the records of a run: one device's, under any product."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.checkpoint import checkpoint

import integration.data
from integration.models import RouterSize
from integration.train.config import TrainConfig
from integration.train.measurement.expert_load import ExpertLoad, shares
from integration.train.metrics import read_metrics
from testkit import run_ranks

TEXT = integration.data.__path__[0]
ONE = {"data": TEXT, "steps": 2, "global_batch": 8, "micro_batch": 8, "final_checkpoint": False}


def _run(runs):
    import torch.distributed as dist

    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare
    from integration.train.stop import StopRequest

    world = World(dist.get_rank(), dist.get_world_size())
    for options in runs:
        config = TrainConfig(resume="never", **ONE | options)
        Trainer(prepare(config, world.size), world).run(StopRequest())


class TopKRouter(nn.Module):
    """Chooses the first two of three experts for each token."""

    num_experts = 3

    def forward(self, tokens):
        chosen = torch.tensor([[0, 1]] * len(tokens))
        weights = torch.ones_like(chosen)
        weights[3:, 1] = 0  # drops what the first three tokens leave
        return tokens, weights, chosen


def test_forwards_of_a_step_are_counted_once_though_backward_recomputes_them():
    model = nn.Sequential(nn.Linear(2, 2), TopKRouter())
    load = ExpertLoad(model, {"1": RouterSize(3, 2)}, "cpu")
    tokens = torch.ones(5, 2, requires_grad=True)
    for _ in range(2):
        with load.step():
            for _ in range(2):  # microbatches
                checkpoint(model, tokens, use_reentrant=False)[0].sum().backward()
        model(tokens)  # as an evaluation
        assert load.counts.tolist() == [[[10, 10, 0]]]
    assert shares(load.counts[0]) == [[0.5, 0.5, 0.0]]
    assert load.dropped(load.counts, 10) is None


def test_choices_without_a_weight_are_dropped():
    model = TopKRouter()
    load = ExpertLoad(
        model, {"": RouterSize(3, 2), "other stage's": RouterSize(4, 2)}, "cpu", drops=True
    )
    with load.step():
        model(torch.ones(5, 2))
    assert load.counts[:, 0].tolist() == [[5, 5, 0, 0], [0, 2, 0, 0]]
    assert not load.counts[:, 1].any()


@pytest.mark.ranks
@pytest.mark.slow
def test_shares_of_experts_are_those_of_one_device(tmp_path):
    plan = {"model": "mixtral-tiny", "system": "plan"}
    runs = {
        "fsdp2": {"model": "mixtral-tiny", "system": "fsdp2", "micro_batch": 2},  # accumulates
        "ep": plan | {"dp_shard": 2, "ep": 2, "micro_batch": 4},
        "tp": plan | {"tp": 2, "activation_checkpointing": "full", "static": True},
        "llama": {"model": "llama-tiny", "system": "fsdp2", "micro_batch": 4},
        "pipeline": plan | {"pp_degree": 2, "pp_microbatches": 2, "micro_batch": 8},
        "accumulated": plan | {"dp_replicate": 2, "static": True, "micro_batch": 2},
    }
    on = {name: options | {"out": tmp_path / name} for name, options in runs.items()}
    run_ranks(_run, 1, [{"model": "mixtral-tiny", "out": tmp_path / "one"}])
    run_ranks(_run, 2, [*on.values()], timeout=240)
    load = {
        name: [record.expert_load for record in read_metrics(tmp_path / name)]
        for name in ("one", *runs)
    }
    assert load.pop("llama") == [None, None]
    one = load.pop("one")
    choices = 8 * 64 * 2  # of a step: a token has two
    for layers in one:
        assert [len(layer) for layer in layers] == [4, 4]
        assert [sum(layer) for layer in layers] == pytest.approx([1, 1])
        assert all(share * choices == round(share * choices) for layer in layers for share in layer)
        assert len(set(layers[0])) > 1
    for name, steps in load.items():
        for found, expected in zip(steps, one, strict=True):
            for layer, of_one in zip(found, expected, strict=True):
                # Rounding changes the choice of a few tokens between nearly equal experts.
                assert layer == pytest.approx(of_one, abs=3 / choices), name
    events = EventAccumulator(str(tmp_path / "ep" / "tensorboard"))
    events.Reload()
    written = events.Scalars("expert load/layer 1, expert 3")
    assert [one.value for one in written] == pytest.approx([step[1][3] for step in load["ep"]])


@pytest.mark.ranks
@pytest.mark.slow
def test_dropped_tokens_are_those_of_one_device(tmp_path):
    shared = {"model": "mixtral-tiny", "capacity_factor": 0.5}
    plan = shared | {"system": "plan"}
    runs = {
        "ddp": shared | {"system": "ddp", "micro_batch": 2},  # accumulates
        "sp": plan | {"tp": 2, "sp": True, "ep": 2, "activation_checkpointing": "full"},
        "tp": plan | {"tp": 2},  # both ranks have all tokens
        "pipeline": plan | {"pp_degree": 2, "pp_microbatches": 2, "static": True},
    }
    on = {name: options | {"out": tmp_path / name} for name, options in runs.items()}
    run_ranks(_run, 1, [shared | {"out": tmp_path / "one"}])
    run_ranks(_run, 2, [*on.values()], timeout=240)
    drops = {
        name: torch.tensor([record.dropped_tokens for record in read_metrics(tmp_path / name)])
        for name in ("one", *runs)
    }
    one = drops.pop("one")
    loads = torch.tensor([record.expert_load for record in read_metrics(tmp_path / "one")])
    tokens, limit = 8 * 64, 16  # of a step; of a sequence, 0.5 * 64 * 2 / 4
    within = (loads * tokens * 2).round() - one
    assert one.shape == (2, 2, 4)
    assert (within <= 8 * limit).all()
    assert (within >= 0).all()
    assert (one > 0).all()  # all experts are chosen more often than that
    for name, found in drops.items():
        assert (found - one).abs().max() <= 3, name  # see above
    events = EventAccumulator(str(tmp_path / "sp" / "tensorboard"))
    events.Reload()
    written = events.Scalars("dropped tokens/layer 1, expert 3")
    assert [one.value for one in written] == drops["sp"][:, 1, 3].tolist()
