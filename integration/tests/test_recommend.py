"""Recommendations: what is predicted is what the simulator counts of the whole product."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp.simulate.events import CommEvent
from fsdp.simulate.recorder import EventRecorder, MemoryKind
from integration.models import build_model_on_meta, loss_of
from integration.pipeline.bubble import expected_bubble
from integration.recommend.__main__ import main
from integration.recommend.candidates import Inner, candidates, inner_run, refusal
from integration.recommend.hardware import HARDWARE
from integration.recommend.options import RecommendOptions, prepare
from integration.recommend.output import product
from integration.recommend.prediction import predict
from integration.recommend.search import recommend
from integration.recommend.work import InnerWork, Part, count_work
from integration.scale.strategies import WorldAxis
from integration.scale.traffic import AxisTraffic, StepWork, sent_collective
from integration.train.config import TrainConfig, read_toml
from integration.train.validation import validate
from plan_api import Plan
from testkit import fake_mesh

H100, GLOO = HARDWARE["h100"], HARDWARE["gloo"]
LENGTH, ADAM = 64, 8.0


def config_of(**options):
    own = {"system": "plan", "model": "llama-tiny", "device": "cpu", "micro_batch": 1}
    return TrainConfig(**own | options)


def recorded(config, ranks):
    """Bytes that rank 0 sends in a step of one microbatch, and the memory of the whole product."""
    run = validate(config, ranks)
    with fake_mesh((ranks,)):
        model = run.system.parallelize(build_model_on_meta(run.shape), run.shape, ranks)
        tokens = torch.zeros(config.global_batch, LENGTH, dtype=torch.long)
        with EventRecorder() as recorder:
            recorder.watch(model.to_empty(device="cpu"))
            for _ in range(2):
                model.zero_grad()
                recorder.start_step()
                loss_of(model(input_ids=tokens, labels=tokens)).backward()
                recorder.finish_step()
        sent = sum(
            sent_collective(event).wire_bytes
            for event in recorder.events
            if isinstance(event, CommEvent)
        )
        local = [p._local_tensor if isinstance(p, DTensor) else p for p in model.parameters()]
        parameters = sum(4 * each.numel() for each in local)
        total = recorder.allocated(MemoryKind.PARAMETERS) + sum(recorder.worst.values())
    return sent, parameters, total


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        pytest.param(
            {"dp_shard": 4, "global_batch": 4}, 4, id="FSDP", marks=pytest.mark.slow
        ),
        pytest.param(
            {"dp_shard": 2, "tp": 2, "sp": True, "loss_parallel": True, "global_batch": 2},
            4,
            id="FSDP x TP",
        ),
        pytest.param(
            {"dp_shard": 2, "dp_replicate": 2, "global_batch": 4}, 4, id="HSDP",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"dp_shard": 2, "placements": "zero2", "global_batch": 2}, 2, id="zero2",
            marks=pytest.mark.slow,
        ),
        pytest.param({"dp_replicate": 2, "global_batch": 2}, 2, id="DP", marks=pytest.mark.slow),
        pytest.param(
            {"dp_shard": 2, "cp": 2, "global_batch": 2}, 4, id="FSDP x CP", marks=pytest.mark.slow
        ),
        pytest.param(
            {"dp_shard": 2, "global_batch": 2, "activation_checkpointing": "full"}, 2,
            id="recompute", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_product_is_predicted_as_the_simulator_counts_it(options, ranks):
    config = config_of(**options)
    made = predict(config, count_work(inner_run(config)), ranks, GLOO, ADAM)
    sent, parameters, total = recorded(config, ranks)
    assert made.sent == pytest.approx(sent, rel=0.05)
    assert made.memory.parameters == pytest.approx(parameters, rel=0.03)
    memory = made.memory
    assert 0.9 * total <= memory.total - memory.optimizer <= 1.15 * total


@pytest.mark.slow
def test_layers_with_and_without_experts_are_counted_once_each():
    run = inner_run(config_of(model="deepseek-v3-tiny", sequence_length=LENGTH))
    shape = replace(run.shape, num_hidden_layers=5, first_k_dense_replace=2)
    work = count_work(replace(run, shape=shape))
    model = build_model_on_meta(shape)
    elements = sum(param.numel() for param in model.parameters())
    assert work.layers == 5
    assert work.root.elements + 5 * work.layer.elements == pytest.approx(elements, abs=3)
    sizes = [sum(param.numel() for param in layer.parameters()) for layer in model.model.layers]
    assert work.largest == max(sizes)
    assert 0 < work.root.work.flops < work.layer.work.flops


# Of a made-up model: no model is counted.

ROOT = Part(StepWork(flops=2_000, operators=10), 1_000, 0, 100)
LAYER = Part(
    StepWork(
        flops=4_000, operators=20,
        traffic=(AxisTraffic("all_gather", WorldAxis("tp", 2, 1), 4, 800),),
    ),
    500, 0, 300,
)  # fmt: skip
MADE_UP = InnerWork(ROOT, LAYER, layers=6, largest=500, temporary=50, boundary=64)


def predicted(hardware=H100, ranks=8, work=MADE_UP, **options):
    return predict(config_of(**({"global_batch": 8} | options)), work, ranks, hardware, ADAM)


def test_sharding_divides_parameters_gradients_and_state_but_not_activations():
    one, eight = predicted(ranks=1), predicted(dp_shard=8)
    for kind in ("parameters", "gradients", "optimizer"):
        assert getattr(eight.memory, kind) == pytest.approx(getattr(one.memory, kind) / 8)
    assert one.memory.parameters == 4 * (1_000 + 6 * 500)
    assert eight.memory.activations == one.memory.activations == 6 * 300 + 100 + 50


def test_offloading_moves_what_a_rank_owns_to_its_host():
    stays, moved = predicted(dp_shard=8), predicted(dp_shard=8, offload=True)
    memory = stays.memory
    owned = memory.parameters + memory.gradients + memory.optimizer
    assert moved.memory.host == owned
    assert moved.memory.parameters == moved.memory.gradients == moved.memory.optimizer == 0
    assert memory.total - moved.memory.total >= memory.parameters + memory.optimizer
    assert moved.time.update > stays.time.update


def test_the_peak_is_where_backward_begins_or_ends():
    many = predicted(dp_shard=2, micro_batch=4).memory
    assert many.total == (
        many.parameters + many.optimizer + many.gathered + many.gradients + many.reducing
    )
    layer = replace(LAYER, saved=300_000)
    large = predicted(dp_shard=2, micro_batch=4, work=replace(MADE_UP, layer=layer)).memory
    assert large.activations == 4 * (6 * 300_000 + 100 + 50)
    assert large.total == (large.parameters + large.optimizer + large.gathered + large.activations)


def test_gathering_once_sends_no_layers_in_backward_and_keeps_all():
    twice, once = predicted(dp_shard=8), predicted(dp_shard=8, placements="zero2")
    assert twice.sent - once.sent == pytest.approx(4 * 6 * 500 * 7 / 8)  # not the root's
    assert once.memory.gathered > twice.memory.gathered


def test_a_pipeline_waits_as_its_schedule_says():
    options = {"pp_degree": 4, "micro_batch": 8, "pp_microbatches": 8}
    config = replace(config_of(global_batch=8), **options)
    made = predict(config, MADE_UP, 4, GLOO, ADAM)
    time = made.time
    idle = expected_bubble("1F1B", 4, 8, 1)
    busy = time.compute + time.host + time.tensor
    assert time.bubble == pytest.approx(busy * idle / (1 - idle))
    machine = GLOO.machine
    assert time.transfers == pytest.approx(
        16 * (64 / machine.inside.bandwidth + 2 * machine.inside.latency), rel=1e-3
    )
    assert time.busy == pytest.approx(time.total - time.bubble)
    received = GLOO.machine.inside.latency * 16
    device = predict(config, MADE_UP, 4, replace(GLOO, accelerator=True), ADAM)
    assert device.time.transfers == pytest.approx(time.transfers - received)
    # Two of six layers, with four of eight microbatches in memory.
    assert made.memory.activations == 4 * 2 * 300 + 100 + 50


def test_microbatches_gather_layers_once_more_and_reduce_again_but_replicas_once():
    options = {"dp_shard": 2, "dp_replicate": 2, "global_batch": 8}
    one, two = (predicted(micro_batch=size, **options) for size in (2, 1))
    layers, of_tp = 6 * 500, 6 * 800
    everything = 1_000 + layers
    assert two.sent - one.sent == pytest.approx(4 * (layers + everything) / 2)
    of_one = 4 * (everything + layers + everything) / 2 + 4 * everything / 2
    assert one.sent == pytest.approx(2 * of_tp + of_one)
    assert two.memory.gradients == one.memory.gradients
    assert two.memory.stays_gathered == 4 * everything - two.memory.gathered
    assert one.memory.stays_gathered == 0


def test_a_stage_has_its_layers_and_half_of_the_root_and_reduces_once():
    made = predicted(ranks=4, pp_degree=2, dp_shard=2, micro_batch=4, pp_microbatches=4)
    elements = 1_000 / 2 + 4 * 500  # the root's ends count as a layer each: 4 of 8
    assert made.memory.parameters == 4 * elements / 2
    assert made.memory.gathered == made.memory.accumulated == 4 * elements
    assert made.memory.reducing == 8 * 500 + 4 * elements
    of_tp, transfers = 4 * (6 * 800 / 2), 4 * 64  # the last stage has one neighbour
    gathered = reduced = 4 * elements / 2
    assert made.sent == pytest.approx(of_tp + gathered + reduced + transfers)


def test_gathers_are_in_the_dtype_of_compute_and_reductions_in_fp32():
    wide, narrow = predicted(dp_shard=8, dtype="fp32"), predicted(dp_shard=8, dtype="bf16")
    assert wide.sent - narrow.sent == pytest.approx(2 * (1_000 + 2 * 6 * 500) * 7 / 8)
    assert narrow.memory.gathered == wide.memory.gathered / 2
    assert predicted(dp_replicate=8, dtype="bf16").memory.gathered == 2 * (1_000 + 6 * 500)
    assert predicted(dp_replicate=8, dtype="fp32").memory.gathered == 0


@pytest.mark.parametrize(
    ("options", "shards", "sent"),
    [
        pytest.param({"dp_shard": 4}, 4, 4 * 7_200 / 2 + 4 * 3 / 4 * 11_000, id="sharded"),
        pytest.param({"dp_replicate": 4}, 1, 2 * 4 * (2_400 / 2 + 4_000 * 3 / 4), id="replicated"),
    ],
)
def test_experts_are_sharded_over_the_ranks_that_have_the_same_ones(options, shards, sent):
    """400 elements of each layer on a rank of two; two ranks have the same ones."""
    work = replace(MADE_UP, layer=replace(LAYER, experts=400))
    made = predicted(ranks=4, ep=2, micro_batch=2, work=work, **options)
    others, experts = 4_000 / shards, 2_400 / max(1, shards / 2)
    assert made.memory.parameters == 4 * (others + experts)
    assert made.sent == pytest.approx(2 * 6 * 800 + sent)


def test_hooks_of_buckets_take_time_on_the_host():
    slow = replace(GLOO, bucket=1.0)
    options = {"dp_shard": 8, "micro_batch": 1, "global_batch": 16}
    added = predicted(slow, **options).time.data - predicted(GLOO, **options).time.data
    # Seven gathers for forward; for each of two microbatches six for backward, seven reductions.
    assert added == pytest.approx(33 * (1 - GLOO.bucket))


def test_hosts_of_accelerators_launch_while_these_compute():
    slow = replace(GLOO, accelerator=True)
    assert predicted(GLOO).time.host == pytest.approx((10 + 6 * 20) * GLOO.operator * 8)
    device = predicted(slow).time
    assert device.host < predicted(GLOO).time.host


def test_the_reason_names_the_largest_terms():
    time = replace(
        predicted(ranks=1).time,
        compute=6.0,
        host=0.0,
        tensor=3.0,
        data=0.5,
        transfers=0.0,
        bubble=0.5,
        update=0.0,
    )
    assert time.reason == "compute 60%, TP 30%"
    other = replace(time, tensor=0.5, transfers=1.5, bubble=1.0)
    assert other.reason == "compute 63%, PP 16%, bubble 11%"


# The search.


def setup_of(**options):
    return prepare(RecommendOptions(**({"model": "llama-tiny", "hardware": "gloo"} | options)))


def test_candidates_use_all_ranks_and_the_whole_batch():
    setup = setup_of(ranks=16, global_batch=16)
    found = list(candidates(setup.base, 16, GLOO))
    for config in found:
        data = config.dp_replicate * config.dp_shard
        assert config.pp_degree * data * config.cp * config.tp == 16
        assert config.global_batch % (data * config.micro_batch) == 0
    assert {config.pp_degree for config in found} == {1, 2}
    assert len(set(found)) == len(found)


def test_inner_products_that_are_simulated_are_as_many_on_any_number_of_ranks():
    def found(ranks):
        setup = setup_of(ranks=ranks, global_batch=ranks, hardware="h100", sequence_length=8192)
        made = list(candidates(setup.base, ranks, H100))
        return len(made), {Inner.of(config) for config in made}

    few, many = found(64), found(1024)
    assert many[0] > few[0]
    assert many[1] == few[1]
    assert len(many[1]) == 4 * 3 * 2  # TP, CP and recomputation


def test_bounds_of_the_search():
    def found(hardware=GLOO, **options):
        setup = setup_of(ranks=16, global_batch=16, **options)
        return list(candidates(setup.base, 16, hardware))

    assert max(each.tp for each in found(H100)) == H100.machine.node == 8
    assert max(each.tp for each in found()) == 16
    assert {each.cp for each in found()} == {1, 2}
    assert {each.cp for each in found(sequence_length=8192)} == {1, 2, 4}
    assert {each.offload for each in found()} == {False}
    assert all(each.dp_shard > 1 for each in found(H100) if each.offload)
    assert {each.offload for each in found(H100)} == {False, True}
    assert {each.activation_checkpointing for each in found()} == {"none", "full"}
    assert {each.placements for each in found()} == {None, "zero2"}
    assert {each.ep for each in found()} == {1}
    assert {each.ep for each in found(model="mixtral-tiny")} == {1, 2, 4}


def test_the_trainer_refuses_what_it_would_refuse():
    setup = setup_of(ranks=16, global_batch=16)
    eight = next(each for each in candidates(setup.base, 16, GLOO) if each.tp == 8)
    assert "num_attention_heads" in refusal(eight, 16)
    with pytest.raises(Exception, match="num_attention_heads"):
        inner_run(eight)


def test_ranked_candidates_fit_are_accepted_and_ascend(monkeypatch):
    monkeypatch.setattr("integration.recommend.search.count_work", lambda run: MADE_UP)
    everything = recommend(setup_of(ranks=4, top=1000))
    limit = sorted(each.memory.total for each in everything.ranked)[len(everything.ranked) // 2]
    found = recommend(setup_of(ranks=4, top=1000, memory=limit / 1e9))
    assert 0 < len(found.ranked) < len(everything.ranked)
    assert found.too_large > 0
    times = [each.time.total for each in found.ranked]
    assert times == sorted(times)
    for each in found.ranked:
        assert each.memory.total <= limit
        validate(each.config, 4)


@pytest.mark.slow  # simulates all candidates
def test_the_command_writes_what_the_trainer_reads(tmp_path, capsys):
    out = tmp_path / "best"
    words = ["llama-tiny", "--ranks", "2", "--hardware", "gloo", "--json", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.err.startswith(f"{found['candidates']} candidates, of which 0 do not fit")
    best = found["recommendations"][0]
    config = read_toml(out / "recipe.toml")
    assert validate(config, 2).config.model == "llama-tiny"
    for name, value in best["options"].items():
        assert getattr(config, name) == value
    degrees = validate(config, 2).system.degrees
    with fake_mesh((2 // config.pp_degree,)):
        axes = degrees.axes
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        plan = Plan.from_json((out / "plan.json").read_text(), mesh)
    assert plan.entries
    assert math.isclose(sum(best["seconds_by_term"].values()), best["seconds"])


def test_nothing_that_fits_is_an_error_that_names_the_smallest(monkeypatch, capsys):
    monkeypatch.setattr("integration.recommend.search.count_work", lambda run: MADE_UP)
    words = ["llama-tiny", "--ranks", "2", "--hardware", "gloo", "--memory", "1e-9"]
    assert main(words) == 1
    assert "Nothing fits: the smallest takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["llama-tiny", "--ranks", "0"], "--ranks"),
        (["llama-tiny", "--ranks", "2", "--memory", "-1"], "--memory"),
        (["no-such-model", "--ranks", "2"], "no-such-model"),
    ],
)
def test_wrong_options_are_refused(words, named, capsys):
    assert main(words) == 2
    assert named in capsys.readouterr().err


def test_a_product_is_named_by_its_degrees():
    assert product(config_of(pp_degree=2, dp_shard=4, tp=8)) == "PP2 FSDP4 TP8"
    assert product(config_of()) == "1"
