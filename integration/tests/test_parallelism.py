"""What runs of kinds of parallelism come to, from folders made up here, and the report on it."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from integration.compare.options import CompareOptions
from integration.compare.parallel_jobs import ParallelCase, parallel_jobs
from integration.compare.parallelism import ParallelVerdict, collect, passes
from integration.compare.random_jobs import Source
from integration.compare.results import Results, write_results
from integration.compare.runner import Outcome
from integration.errors import UsageError
from integration.metrics import MetricsFile, RunSummary, StepRecord, write_summary
from integration.report.case_figure import draw_cases
from integration.report.comparison_terminal import _parallel_table
from integration.report.formatting import TIMES
from integration.report.palette import DARK, LIGHT
from integration.report.parallel_figure import FLOOR, draw_parallelism
from integration.report.parallel_text import (
    TITLES,
    parallel_finding,
    parallel_rows,
    parallel_text,
)
from integration.train.config import parse_config

LOSSES = [5.0, 4.0]
CLOSE = [5.0, 4.000005]
FAR = [5.0, 4.5]


def jobs_of(out, **changes):
    options = {"parallel_models": "llama-tiny,dit-tiny", "parallel_steps": len(LOSSES)} | changes
    return parallel_jobs(CompareOptions(out=out, **options))


def made_up(out, **changes):
    """All runs, plans' close to one device and native torch's not; ``changes`` by folder."""
    jobs = jobs_of(out)
    outcomes = []
    for each in jobs:
        one_device = each.reference is None
        usual = LOSSES if one_device else FAR if each.source is Source.NATIVE else CLOSE
        losses = changes.get(each.job.name.replace("-", "_"), usual)
        each.job.folder.mkdir(parents=True)
        each.job.log.write_text("Traceback: gone\n")
        metrics = MetricsFile(each.job.folder, keep_steps=0)
        for step, loss in enumerate(losses or [], start=1):
            metrics.append(StepRecord(step=step, loss=loss, seconds=0.5, tokens=512))
        metrics.close()
        if losses is not None:
            write_summary(
                each.job.folder,
                RunSummary(
                    system=each.job.system,
                    model=each.model,
                    parameters=1,
                    world_size=each.job.ranks,
                    data_parallel_degree=1,
                    accumulation=1,
                    micro_batch=4,
                    steps=len(LOSSES),
                    data_source="text",
                    peak_rss_bytes=[1] * each.job.ranks,
                ),
            )
        outcomes.append(Outcome(each.job, 0 if losses is not None else 7))
    return collect(jobs, outcomes)


def test_runs_of_one_source_and_number_of_ranks_share_processes(tmp_path):
    jobs = jobs_of(tmp_path)
    assert len({each.job.session for each in jobs}) == 5
    for each in jobs:
        config = parse_config(each.job.arguments)
        native = each.source is Source.NATIVE or (
            each.case is ParallelCase.NEITHER and config.system not in ("plan", "fsdp")
        )
        assert each.job.session == f"{config.ranks}-{'native' if native else 'dist-rng'}"
        source = Source.NATIVE if each.case is ParallelCase.NEITHER else each.source
        assert config.random == source.option
        assert (config.model, config.steps) == (each.model, 2)
        assert (config.init == "sharded") == (
            each.case.draws_weights and (each.reference is not None or "redrawn" in each.job.name)
        )
        assert (config.dropout > 0) == each.case.drops_out
    assert len({each.job.name for each in jobs}) == len(jobs)
    folders = {each.job.name for each in jobs if each.reference is None}
    assert {each.reference for each in jobs if each.reference is not None} == folders


def test_each_model_has_what_it_can_be_trained_by(tmp_path):
    jobs = jobs_of(tmp_path, parallel_models="llama-tiny,mixtral-tiny,dit-tiny")
    ways = {
        model: {each.variant.name for each in jobs if each.model == model}
        for model in ("llama-tiny", "mixtral-tiny", "dit-tiny")
    }
    assert {"plan-cp-ring", "dtensor-tp", "plan-tp-sp-loss"} <= ways["llama-tiny"]
    assert {"plan-ep", "plan-fsdp4-ep2", "plan-tp-sp-loss"} <= ways["mixtral-tiny"]
    assert "plan-cp-ring" not in ways["mixtral-tiny"]
    assert not {"plan-ep", "plan-cp-ring", "plan-tp-sp-loss"} & ways["dit-tiny"]
    for names in ways.values():
        assert {
            "dtensor-tp",
            "ddp",
            "fsdp1",
            "fsdp",
            "plan-fsdp-tp",
            "pp-1F1B",
            "pp-GPipe",
        } <= names
    of_context = {each.case for each in jobs if each.variant.name == "plan-cp-ring"}
    assert of_context == {ParallelCase.INIT}  # its attention has no dropout


@pytest.mark.parametrize("every", [False, True])
def test_on_four_ranks_cases_run_separately_on_request(tmp_path, every):
    cases = {"plan-tp-sp": set(), "plan-dp-tp-sp": set()}
    for each in jobs_of(tmp_path, every_case=every):
        if each.variant.name in cases:
            cases[each.variant.name].add(each.case)
    alone = {ParallelCase.INIT, ParallelCase.DROPOUT}
    assert cases == {
        "plan-tp-sp": {*alone, ParallelCase.BOTH},
        "plan-dp-tp-sp": {*(alone if every else ()), ParallelCase.BOTH},
    }


def test_bad_options_are_refused_and_do_not_matter_where_it_is_left_out(tmp_path):
    with pytest.raises(UsageError, match="unknown model 'nope'"):
        jobs_of(tmp_path, parallel_models="nope")
    with pytest.raises(UsageError, match="--parallel-steps is 0"):
        jobs_of(tmp_path, parallel_steps=0)
    assert jobs_of(tmp_path, parallel_models="nope", parallelism=False) == ()


def test_plans_have_a_verdict_and_native_runs_have_none(tmp_path):
    results = made_up(tmp_path)
    assert {each.verdict for each in results if each.native} == {ParallelVerdict.UNJUDGED}
    assert {each.verdict for each in results if not each.native} == {ParallelVerdict.SAME}
    assert passes(results)
    assert Results((), (), (), results).passes
    assert "the largest difference from one device is 5e-6 for llama-tiny" in (
        parallel_finding(results)
    )
    assert "up to 0.5, are shown" in parallel_text(results).subject


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"dit_tiny_both_plan_hsdp": FAR},
            "dit-tiny by plan-hsdp (both) exceeds its tolerance: it differs by 0.5",
        ),
        ({"dit_tiny_init_plan_tp": None}, "dit-tiny by plan-tp (random init) ended with exit code"),
        (
            {"llama_tiny_neither_single": None},
            "llama-tiny by ddp (neither) was not compared",
        ),
    ],
    ids=["far", "failed", "no reference"],
)
def test_a_failed_run_fails_the_comparison_and_is_named(tmp_path, change, sentence):
    results = made_up(tmp_path, **change)
    assert not Results((), (), (), results).passes
    assert sentence in parallel_finding(results)


def test_a_row_has_a_cell_for_each_case(tmp_path):
    rows = {(row.model, row.way): row for row in parallel_rows(made_up(tmp_path))}
    tp = rows["llama-tiny", "plan-tp"]
    assert [cell.maximum for cell in tp.cells] == ["5e-6", "5e-6", "5e-6", "\N{EN DASH}"]
    assert tp.cells[0].mean == "2.5e-6"
    assert (tp.ranks, tp.tolerance, tp.judged, tp.passes) == ("2", "1e-5", True, True)
    assert tp.microbatches == f"1 {TIMES} 4"
    assert not rows["llama-tiny", "fsdp2 (native)"].judged
    assert [cell.maximum for cell in rows["dit-tiny", "pp-1F1B"].cells][-1] == "5e-6"


def test_the_figure_has_a_column_for_each_model(tmp_path):
    results = made_up(tmp_path)
    for theme in (LIGHT, DARK):
        columns = draw_parallelism(results, theme).get_axes()
        titles = [axes.get_title(loc="left") for axes in columns]
        assert titles == ["llama-tiny: largest |Δ|", "dit-tiny: largest |Δ|"]
        drawn = sum(len(points.get_offsets()) for points in columns[0].collections)
        assert drawn == len([each for each in results if each.model == "llama-tiny"])


def test_the_curves_have_a_panel_for_each_model_and_case(tmp_path):
    results = made_up(tmp_path)
    for theme in (LIGHT, DARK):
        panels = {
            axes.get_title(loc="left"): axes for axes in draw_cases(results, theme).get_axes()
        }
        cases = ("random init", "dropout", "both")
        models = ("llama-tiny", "dit-tiny")
        assert list(panels) == [f"{model}: {case}" for model in models for case in cases]
        for model, case in itertools.product(
            models, (ParallelCase.INIT, ParallelCase.DROPOUT, ParallelCase.BOTH)
        ):
            shown = [each for each in results if each.model == model and each.case is case]
            (*lines, tolerance) = panels[f"{model}: {TITLES[case]}"].get_lines()
            assert len(lines) == len(shown)
            assert set(tolerance.get_ydata()) == {shown[0].tolerance}
            for line, result in zip(lines, shown, strict=True):
                found = result.deviation.differences
                assert list(line.get_ydata()) == [max(value, FLOOR) for value in found]
                assert line.get_color() == theme.series[int(result.native)]


def test_zero_differences_are_drawn_and_infinite_ones_are_left_out(tmp_path):
    result = next(each for each in made_up(tmp_path) if each.case is ParallelCase.INIT)
    deviation = replace(result.deviation, differences=(0.0, math.inf, 1e-6))
    first = draw_cases([replace(result, deviation=deviation)], LIGHT).get_axes()[0]
    zero, lost, small = first.get_lines()[0].get_ydata()
    assert first.get_ylim()[0] < zero < 1e-7
    assert math.isnan(lost)
    assert small == 1e-6


def test_results_and_terminal_hold_every_run(tmp_path, capsys):
    results = made_up(tmp_path)
    write_results(tmp_path / "results.json", Results((), (), (), results), {})
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["parallelism"]) == len(results)
    assert {each["work"]["samples"] for each in found["parallelism"]} == {4}
    Console(width=100).print(_parallel_table(results))
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "plan-dp-tp-sp-static" in line
    ]
    assert len(lines) == 2
    assert lines[0].split() == [
        "llama-tiny",
        "plan-dp-tp-sp-static",
        "4",
        *["1", TIMES, "4"],
        *["\N{EN DASH}"] * 2,
        "5e-6",
        "\N{EN DASH}",
    ]
