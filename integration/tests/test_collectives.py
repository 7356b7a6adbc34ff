"""Collectives and products of a step are counted, whoever issues them, and of that step alone."""

from dataclasses import asdict

import pytest
import torch

from integration.compare.variants import get_variant
from integration.models import model_shape
from integration.train.measurement import collectives
from integration.train.measurement.collectives import CollectiveCounter
from integration.train.measurement.memory import peak_rss_bytes, reset_peak_rss
from integration.train.metrics import CollectiveCount, read_metrics, read_summary
from testkit import run_ranks

# Of llama-tiny: two layers between an embedding and an output layer of 256 tokens.
PARAMETERS = 115008 * 4
LAYERS = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) * 4
FREQUENCIES = 16 // 2 * 4
HIDDEN = 8 * 64 * 64 * 4  # samples, tokens, elements
GATHERED = PARAMETERS + LAYERS  # the root's group is kept for backward
# Of a microbatch of 4 samples of 64 tokens: six for each token and element of a matrix; and of
# attention, two products of queries by keys in forward and five in backward.
MATRICES = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 256
FLOPS = 6 * MATRICES * 4 * 64 + 2 * (2 + 5) * 2 * 4 * 64**3
EXPECTED = {
    # One bucket, beside the buffers that forward begins with, each of which exists twice.
    "ddp": {"broadcast": (1, 2 * FREQUENCIES), "all_reduce": (1, PARAMETERS)},
    # A group per layer, and the root's, which stays gathered until backward is over.
    "fsdp1": {"all_gather": (5, GATHERED), "reduce_scatter": (3, PARAMETERS)},
    "fsdp2": {"all_gather": (5, GATHERED), "reduce_scatter": (3, PARAMETERS)},
    # The same by exchange: a rank sends the other its half, and a gradient's other half. Each
    # transfer is counted once, by its sender.
    "fsdp": {"send": (8, (GATHERED + PARAMETERS) / 2)},
}


def _body(runs):
    import torch.distributed as dist

    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare

    class Stop:
        requested = False

    world = World(dist.get_rank(), dist.get_world_size())
    for run in runs:
        Trainer(prepare(TrainConfig(**run), world.size), world).run(Stop())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Run folders of two ranks, by system: four steps, the third of which was counted."""
    out = tmp_path_factory.mktemp("collectives")
    names = (*EXPECTED, "dtensor-tp", "titan-fsdp", "plan-dp", "plan-fsdp")
    runs = [
        {key: value for key, value in get_variant(name).choices.items() if key != "ranks"}
        | {"model": "llama-tiny", "out": out / name, "steps": 4, "resume": "never"}
        | {"tensorboard": False, "count_collectives": 3}
        for name in names
    ]
    uncounted = runs[0] | {"out": out / "uncounted", "count_collectives": None}
    run_ranks(_body, 2, [*runs, uncounted], timeout=240)
    return out


def counts(folder):
    summary = read_summary(folder)
    return {each.kind: (each.calls, each.bytes) for each in summary.collectives}


@pytest.mark.ranks
@pytest.mark.parametrize("name", EXPECTED)
def test_collectives_of_data_parallelism_are_those_of_its_groups(name, folders):
    found = counts(folders / name)
    if name in ("fsdp1", "fsdp2", "fsdp"):  # rows are padded to a common length, by little
        assert {kind: calls for kind, (calls, _) in found.items()} == {
            kind: calls for kind, (calls, _) in EXPECTED[name].items()
        }
        for kind, (_, size) in EXPECTED[name].items():
            assert size <= found[kind][1] <= 1.01 * size
    else:
        assert found == EXPECTED[name]


@pytest.mark.ranks
def test_collectives_of_native_tensor_parallelism_are_reductions_of_hidden_states(folders):
    found = counts(folders / "dtensor-tp")
    # Forward: two in each layer, and the embedding's. Backward: one for each matrix cut by columns.
    calls = (2 * 2 + 1) + (2 * 5 + 1)
    # Every rank trains the whole batch, in two parts, and gathers its logits.
    assert found == {
        "all_reduce": (2 * calls, calls * HIDDEN),
        "all_gather": (2, 8 * 64 * 256 * 4),
    }


@pytest.mark.ranks
def test_a_plan_reduces_gradients_in_one_bucket_and_its_own_collectives_are_seen(folders):
    calls, size = counts(folders / "plan-dp")["all_reduce"]
    assert PARAMETERS <= size <= PARAMETERS + 1024
    assert calls <= 6


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*EXPECTED, "titan-fsdp", "plan-dp", "plan-fsdp"])
def test_every_data_parallel_rank_computes_the_same_microbatch(name, folders):
    summary = read_summary(folders / name)
    assert (summary.accumulation, summary.micro_batch) == (1, 4)
    assert summary.product_flops == FLOPS


@pytest.mark.ranks
def test_a_tensor_parallel_rank_computes_half_of_twice_as_many_microbatches(folders):
    summary = read_summary(folders / "dtensor-tp")
    assert (summary.accumulation, summary.micro_batch) == (2, 4)
    assert summary.product_flops == 2 * FLOPS // 2


def _transfers(both_ways):
    import torch.distributed as dist

    counter, rank = CollectiveCounter(1), dist.get_rank()
    with counter.step(1):
        tensor = torch.ones(6)
        if both_ways:
            operations = [
                dist.P2POp(dist.isend, tensor, 1 - rank),
                dist.P2POp(dist.irecv, torch.empty(6), 1 - rank),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        elif rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
    return counter.counts


@pytest.mark.ranks
def test_a_transfer_is_counted_once_by_the_rank_that_sends_it():
    sent = [CollectiveCount("send", 1, 6 * 4)]
    assert run_ranks(_transfers, 2, False) == [sent, []]
    assert run_ranks(_transfers, 2, True) == [sent, sent]


@pytest.mark.ranks
def test_only_the_requested_step_is_counted_and_losses_do_not_change(folders):
    counted, plain = folders / "ddp", folders / "uncounted"
    assert read_summary(plain).collectives is None
    assert read_summary(plain).product_flops is None
    assert [each.loss for each in read_metrics(counted)] == [
        each.loss for each in read_metrics(plain)
    ]


def test_parts_of_a_step_are_summed_and_other_steps_are_not_counted(single_rank_group):
    counter = CollectiveCounter(2)
    for number in (1, 2, 3):
        for elements in (4, 8):
            with counter.step(number):
                torch.ones(elements, 2) @ torch.ones(2, 3)
                torch.distributed.all_reduce(torch.ones(elements))
                torch.distributed.barrier()
            torch.distributed.all_reduce(torch.ones(100))  # between the parts: not counted
    assert counter.counts == [CollectiveCount("all_reduce", 2, 12 * 4)]
    assert counter.product_flops == 2 * 12 * 2 * 3
    assert asdict(counter.counts[0]) == {"kind": "all_reduce", "calls": 2, "bytes": 48}
    assert CollectiveCounter(None).counts is None
    assert CollectiveCounter(None).product_flops is None


def test_the_memory_of_counting_is_not_the_runs(single_rank_group, monkeypatch):
    peak = {"bytes": 500}
    monkeypatch.setattr(collectives, "peak_rss_bytes", lambda: peak["bytes"])
    monkeypatch.setattr(collectives, "reset_peak_rss", lambda: peak.update(bytes=300))
    counter = CollectiveCounter(1)
    with counter.step(1):
        peak["bytes"] = 900  # as reading the trace does
    assert counter.peak_rss_bytes == 500
    peak["bytes"] = 600
    assert counter.peak_rss_bytes == 600


def test_a_peak_is_counted_anew():
    block = torch.ones(2**26)  # 256 MiB
    with_it = peak_rss_bytes()
    del block
    reset_peak_rss()
    assert peak_rss_bytes() < with_it - 2**27


@pytest.fixture
def single_rank_group():
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_the_shape_that_is_counted_by_is_the_models():
    shape = model_shape("llama-tiny")
    assert (shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers) == (64, 128, 2)
