"""The benchmark of products predicts them from their kinds, and makes rows of runs."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from product_cases import (  # noqa: E402
    MICROBATCHES,
    MODES,
    ONE,
    ONE_ACCUMULATED,
    SAMPLES,
    kinds_of,
    products_of,
    two_ranks,
)
from product_prediction import Cost, Experts, Pipeline, predict  # noqa: E402
from product_rank import RankRun, sent_bytes  # noqa: E402
from products import Runs  # noqa: E402

from integration.train.config import TrainConfig  # noqa: E402
from integration.train.validation import validate  # noqa: E402
from testkit import Collective  # noqa: E402

ONE_COST = Cost(100.0, 0, 0)
FSDP = Cost(130.0, 22, 8e6, 0.5, all_reduces=2)
# 4 ms for each MB, and so -2 ms for what does not depend on them.
GATHERED_TWICE = Cost(138.0, 24, 8e6 + 2e6, 0.5, all_reduces=2)
TP = Cost(90.0, 50, 3e6, 0.6)
PIPELINE = Pipeline(pp=Cost(60.0, 6, 1e6, 0.5), one=Cost(104.0, 0, 0), layers=4, microbatches=2)


def test_fsdp_gathers_what_tp_leaves():
    found = predict(ONE_COST, FSDP, tp=TP)
    assert found == Cost(90.0 + 0.6 * 30.0, 50 + 22, 3e6 + 0.6 * 8e6)


def test_a_part_of_the_time_of_fsdp_does_not_depend_on_bytes():
    bytes_ms, fixed_ms = 10.0 * 4, -2.0
    assert GATHERED_TWICE.cpu_ms == ONE_COST.cpu_ms + bytes_ms + fixed_ms
    found = predict(ONE_COST, GATHERED_TWICE, gathered_once=FSDP, tp=TP)
    assert found.cpu_ms == pytest.approx(90.0 + fixed_ms + 0.6 * bytes_ms)
    assert found.nbytes == 3e6 + 0.6 * 10e6


def test_stages_have_half_of_the_layers_and_a_root_each():
    found = predict(ONE_COST, GATHERED_TWICE, gathered_once=FSDP, pipeline=PIPELINE)
    groups = 20 * (4 + 2) / (4 + 1)  # the loss is reduced for each microbatch, on one stage
    assert found.calls == pytest.approx((groups + 2 * 2) / 2 + 6)
    assert found.nbytes == 8e6 / 2 + 1e6
    assert found.cpu_ms == (104.0 + 30.0) / 2 + (60.0 - 104.0 / 2)


def test_stages_with_sequence_parallelism_send_half():
    found = predict(ONE_COST, GATHERED_TWICE, gathered_once=FSDP, tp=TP, pipeline=PIPELINE)
    assert found.nbytes == (3e6 + 0.6 * 8e6) / 2 + 1e6 / 2
    assert found.calls == pytest.approx((50 + 24 + 4) / 2 + 6)


def test_experts_add_what_their_run_has_beyond_data_parallelism():
    experts = Experts(dp=Cost(120.0, 4, 10e6), dp_ep=Cost(150.0, 24, 9e6, 0.7))
    others = 0.4  # and half of 0.6 are the experts of a rank
    found = predict(ONE_COST, FSDP, experts=experts)
    assert found.calls == 20 + 22
    assert found.nbytes == pytest.approx(9e6 - others * 10e6 + others * 8e6)
    assert found.cpu_ms == pytest.approx(100 + (150 - 100 - others * 20) + others * 30)


def test_a_rank_sends_its_half_to_a_group_of_two():
    assert sent_bytes(Collective("all_reduce", 80, 80, "float32")) == 80
    assert sent_bytes(Collective("all_gather", 40, 80, "float32")) == 40
    assert sent_bytes(Collective("all_to_all", 80, 90, "float32")) == 40


def _cases(model):
    products = [each.case for mode in ("torch", *MODES) for each in products_of(mode, model)]
    kinds = [case for mode in MODES for case in vars(kinds_of(mode)).values()]
    if "mixtral" not in model:
        kinds = [case for case in kinds if "ep" not in case.options]
    return [ONE, ONE_ACCUMULATED, *products, *kinds, *two_ranks(model)]


@pytest.mark.parametrize("model", ["llama-10m", "mixtral-10m", "dit-3m"])
def test_runs_have_equal_samples_and_options_that_are_valid(model):
    for case in _cases(model):
        options = case.options_of(model)
        batches = validate(TrainConfig(**options), case.ranks).batch_plan
        assert batches.accumulation == (MICROBATCHES if case.accumulated else 1), case.name
        assert batches.micro_batch * batches.accumulation == SAMPLES, case.name


def test_a_row_of_a_product_has_its_prediction(monkeypatch):
    def made_up(case, model, *, steps, copies):
        calls = {"all_gather": 10, "all_reduce": 2} if case.ranks > 1 else {}
        times = {"cpu_ms": 10.0 * case.ranks, "wall_ms": 5.0, "first_step_s": 1.0}
        nbytes = dict.fromkeys(calls, 500 if "placements" in case.options else 1000)
        rank = RankRun(**times, memory=2**20, share=1 / case.ranks, calls=calls, nbytes=nbytes)
        return [rank] * case.ranks * copies

    monkeypatch.setattr("products.run", made_up)
    runs = Runs("llama-tiny", steps=1)
    row = runs.product_row(products_of("Eager", "llama-tiny")[0])
    assert row["case"] == "llama-tiny: FSDP2 x TP2 + SP, Eager"
    assert (row["cpu_ms"], row["predicted_cpu_ms"]) == (
        40.0,
        20.0 + 10.0,
    )  # none of FSDP's is for bytes
    assert (row["collectives"], row["predicted_collectives"]) == (12, 24)
    assert row["collectives_ratio"] == 0.5
    assert row["by_kind"] == "10 all_gather, 2 all_reduce"
    assert row["sent_ratio"] == pytest.approx(2000 / 3000)
