"""What runs with random numbers come to, from folders made up here."""

import json
import math

import pytest

from integration.compare.options import CompareOptions
from integration.compare.random_jobs import RandomCase, Source, random_jobs
from integration.compare.random_numbers import RandomVerdict, collect, passes
from integration.compare.results import Results, write_results
from integration.compare.runner import Outcome
from integration.metrics import MetricsFile, RunSummary, StepRecord, write_summary

LOSSES = [5.0, 4.0, 3.5]
CLOSE = [5.0, 4.000005, 3.5]
FAR = [5.0, 4.05, 3.5]
DIST_RNG_RUN = "dropout-dtensor-tp-4-dist-rng"


def made_up(out, **changes):
    """All runs: dist-rng's draw what one device draws, native ones do not; ``changes`` by name.

    A change holds ``losses``, ``weights``, ``masks`` or ``exit``.
    """
    jobs = random_jobs(CompareOptions(out=out, random_steps=len(LOSSES)))
    outcomes = []
    for each in jobs:
        native = each.source is Source.NATIVE and each.job.ranks > 1
        run = {
            "losses": FAR if native else CLOSE if each.job.ranks > 1 else LOSSES,
            "weights": "w2" if native and each.case is RandomCase.INIT else "w1",
            "masks": None if each.case is RandomCase.INIT else "m2" if native else "m1",
            "exit": 0,
        } | changes.get(each.job.name, {})
        write_run(each.job, run)
        outcomes.append(Outcome(each.job, run["exit"]))
    return collect(jobs, outcomes)


def write_run(job, run):
    job.folder.mkdir(parents=True)
    job.log.write_text("Traceback: <broken> & gone\n")
    metrics = MetricsFile(job.folder, keep_steps=0)
    for step, loss in enumerate(run["losses"], start=1):
        metrics.append(StepRecord(step=step, loss=loss, seconds=0.5, tokens=512))
    metrics.close()
    summary = RunSummary(
        system=job.system,
        model="llama-tiny",
        parameters=115008,
        world_size=job.ranks,
        data_parallel_degree=1,
        accumulation=2,
        micro_batch=4,
        steps=len(LOSSES),
        data_source="text",
        peak_rss_bytes=[2**20] * job.ranks,
        initial_weights=run["weights"],
        first_masks=run["masks"],
    )
    write_summary(job.folder, summary)


def by_name(results):
    return {result.name: result for result in results}


def test_one_device_numbers_pass_and_native_is_not_judged(tmp_path):
    results = made_up(tmp_path)
    assert passes(results)
    for case in (results[:5], results[5:]):
        assert [result.verdict for result in case] == [
            RandomVerdict.REFERENCE,
            *[RandomVerdict.UNJUDGED, RandomVerdict.SAME] * 2,
        ]
    init, dropout = results[:5], results[5:]
    assert [result.same_weights for result in init] == [None, False, True, False, True]
    assert [result.same_masks for result in init] == [None] * 5
    assert [result.same_weights for result in dropout] == [None, True, True, True, True]
    assert [result.same_masks for result in dropout] == [None, False, True, False, True]
    assert init[2].deviation.maximum == pytest.approx(5e-6)
    assert init[1].deviation.maximum == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"weights": "w3"}, RandomVerdict.OTHER),
        ({"masks": "m2"}, RandomVerdict.OTHER),
        ({"masks": None}, RandomVerdict.OTHER),
        ({"masks": "m2", "losses": FAR}, RandomVerdict.OTHER),
        ({"losses": FAR}, RandomVerdict.OUTSIDE),
        ({"losses": [5.0, math.nan, 3.5]}, RandomVerdict.OUTSIDE),
        ({"losses": LOSSES[:2]}, RandomVerdict.FAILED),
        ({"exit": 3}, RandomVerdict.FAILED),
    ],
    ids=["weights", "masks", "no masks", "masks and losses", "far", "nan", "short", "exit"],
)
def test_a_run_with_dist_rng_must_draw_and_train_as_one_device(tmp_path, change, verdict):
    results = made_up(tmp_path, **{DIST_RNG_RUN: change})
    assert by_name(results)[DIST_RNG_RUN].verdict is verdict
    assert not passes(results)
    assert sum(not result.verdict.passes for result in results) == 1


def test_missing_hashes_do_not_count_as_equal(tmp_path):
    single = "dropout-single-1-native"
    results = made_up(tmp_path, **{DIST_RNG_RUN: {"masks": None}, single: {"masks": None}})
    assert by_name(results)[DIST_RNG_RUN].same_masks is False
    assert by_name(results)[DIST_RNG_RUN].verdict is RandomVerdict.OTHER


def test_native_runs_pass_with_any_numbers_if_they_finish(tmp_path):
    name = "init-dtensor-tp-2-native"
    assert passes(made_up(tmp_path / "a", **{name: {"losses": [math.nan] * 3}}))
    assert not passes(made_up(tmp_path / "b", **{name: {"exit": 1}}))


def test_a_case_without_its_reference_is_not_compared_and_the_other_is(tmp_path):
    results = made_up(tmp_path, **{"init-single-1-native": {"exit": 1}})
    assert [result.verdict for result in results[:3]] == [
        RandomVerdict.FAILED,
        *[RandomVerdict.UNCOMPARED] * 2,
    ]
    assert results[7].verdict is RandomVerdict.SAME


def test_the_results_file_holds_every_run(tmp_path):
    results = Results((), made_up(tmp_path, **{DIST_RNG_RUN: {"losses": [5.0, math.nan, 3.5]}}))
    write_results(tmp_path / "results.json", results, {})
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["passes"] is False
    runs = {each["name"]: each for each in found["random_numbers"]}
    assert len(runs) == 10
    assert runs[DIST_RNG_RUN]["verdict"] == "outside tolerance"
    assert runs[DIST_RNG_RUN]["same_masks"] is True
    assert runs[DIST_RNG_RUN]["records"][1]["loss"] == "nan"
    assert [failure.name for failure in results.failures] == []
