"""The experiment on parallelism: its runs, and the findings on runs made up here."""

import itertools
import math
from dataclasses import replace

import pytest
from rich.console import Console

from integration.compare.experiment import SharedOptions
from integration.compare.experiments.parallelism import (
    EXPERIMENT,
    FLOOR,
    ParallelCase,
    ParallelOptions,
    draw_cases,
    draw_parallelism,
    shown_results,
)
from integration.compare.result import Verdict
from integration.compare.variants import Source
from integration.errors import UsageError
from integration.report.formatting import TIMES
from integration.report.palette import DARK, LIGHT, style_of
from integration.report.section import Cell, Paragraph, ReportPage, Table
from integration.report.terminal import print_report
from integration.train.config import parse_config

LOSSES = [5.0, 4.0]
CLOSE = [5.0, 4.000005]
FAR = [5.0, 4.5]
MODELS = "llama-tiny,dit-tiny"
ALL = "llama-tiny,mixtral-tiny,dit-tiny"
ABSENT = "\N{EN DASH}"


def runs_of(out, **changes):
    own = ParallelOptions(**{"models": MODELS, "steps": len(LOSSES)} | changes)
    return EXPERIMENT.runs(EXPERIMENT.setting(SharedOptions(out=out), own))


@pytest.fixture
def made_up(made_up_results, tmp_path):
    """All runs, plans' close to one device and native torch's not; keywords are losses by name."""

    def results(**changes):
        def describe(run):
            usual = LOSSES if run.reference is None else CLOSE if run.judged else FAR
            losses = changes.get(run.job.name.replace("-", "_"), usual)
            return {"losses": losses or [], "exit": 7 if losses is None else 0, "accumulation": 1}

        own = ParallelOptions(models=MODELS, steps=len(LOSSES))
        setting, results = made_up_results(EXPERIMENT, own, tmp_path, describe)
        (section,) = EXPERIMENT.report(setting, results).sections
        return results, section

    return results


@pytest.mark.slow
def test_runs_of_one_source_and_number_of_ranks_share_processes(tmp_path):
    runs = runs_of(tmp_path)
    assert len({run.job.session for run in runs}) == 5
    for run in runs:
        config, case = parse_config(run.job.arguments), ParallelCase(run.labels["case"])
        source = Source(run.labels["source"])
        native = source is Source.NATIVE or (
            case is ParallelCase.NEITHER and config.system not in ("plan", "fsdp")
        )
        assert run.job.session == f"{config.ranks}-{'native' if native else 'dist-rng'}"
        assert config.random == (Source.NATIVE if case is ParallelCase.NEITHER else source).option
        assert (config.model, config.steps) == (run.job.model, 2)
        assert (config.init == "sharded") == (
            case.draws_weights and (run.reference is not None or "redrawn" in run.job.name)
        )
        assert (config.dropout > 0) == case.drops_out
    assert len({run.job.name for run in runs}) == len(runs)
    references = {run.job.name for run in runs if run.reference is None}
    assert {run.reference for run in runs if run.reference is not None} == references


def test_each_model_has_what_it_can_be_trained_by(tmp_path):
    runs = runs_of(tmp_path, models=ALL)
    variants = {
        model: {run.job.system for run in runs if run.job.model == model}
        for model in ("llama-tiny", "mixtral-tiny", "dit-tiny")
    }
    assert {"plan-cp-ring", "dtensor-tp", "plan-tp-sp-loss"} <= variants["llama-tiny"]
    assert {"plan-ep", "plan-fsdp4-ep2", "plan-tp-sp-loss"} <= variants["mixtral-tiny"]
    assert "plan-cp-ring" not in variants["mixtral-tiny"]
    assert not {"plan-ep", "plan-cp-ring", "plan-tp-sp-loss"} & variants["dit-tiny"]
    everywhere = {"dtensor-tp", "ddp", "fsdp1", "fsdp", "plan-fsdp-tp", "pp-1F1B", "pp-GPipe"}
    for names in variants.values():
        assert everywhere <= names
    of_context = {run.labels["case"] for run in runs if run.job.system == "plan-cp-ring"}
    assert of_context == {ParallelCase.INIT, ParallelCase.DROPOUT, ParallelCase.BOTH}


@pytest.mark.parametrize("every", [False, True])
def test_on_four_ranks_cases_run_separately_on_request(tmp_path, every):
    cases = {"plan-tp-sp": set(), "plan-dp-tp-sp": set()}
    for run in runs_of(tmp_path, every_case=every):
        if run.job.system in cases:
            cases[run.job.system].add(run.labels["case"])
    alone = {ParallelCase.INIT, ParallelCase.DROPOUT}
    assert cases == {
        "plan-tp-sp": {*alone, ParallelCase.BOTH},
        "plan-dp-tp-sp": {*(alone if every else ()), ParallelCase.BOTH},
    }


def test_a_pipeline_that_draws_masks_runs_one_devices_samples_at_a_time(tmp_path):
    pipelines = {}
    for run in runs_of(tmp_path, every_case=True, models=ALL):
        config, case = run.job.config, run.labels["case"]
        if config.pp_degree > 1 and case != ParallelCase.NEITHER:
            pipelines.setdefault(run.job.system, set()).add(case)
            samples = config.micro_batch * run.job.data_parallel_degree
            assert samples == config.global_batch == 8
            assert samples // config.pp_microbatches == SharedOptions().micro_batch
    assert pipelines.pop("pp-1F1B") == {ParallelCase.DROPOUT}  # of one device's weights
    assert set(map(frozenset, pipelines.values())) == {frozenset({ParallelCase.BOTH})}
    assert len(pipelines) == 10


def test_by_default_a_few_pipelines_of_plans_are_compared(tmp_path):
    def named(**changes):
        systems = {run.job.system for run in runs_of(tmp_path, models=ALL, **changes)}
        return {name for name in systems if "-plan-" in name}

    assert named() == {
        "pp-1F1B-plan-fsdp",
        "pp-1F1B-plan-fsdp-ep",
        "pp-ZBVZeroBubble-plan-tp-sp-static",
    }
    assert len(named(every_case=True)) == 10


def test_named_variants_are_compared_with_the_references_that_they_need(tmp_path):
    runs = runs_of(tmp_path, models="llama-tiny", variants="plan-tp, pp-1F1B-plan-zero3")
    assert {run.job.system for run in runs} == {"single", "plan-tp", "pp-1F1B-plan-zero3"}
    references = {run.job.name for run in runs if run.reference is None}
    assert references == {f"llama-tiny-{case}-single" for case in ("init", "dropout", "both")}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"variants": "nope"}, "unknown system 'nope'"),
        ({"variants": "plan-tp,plan-ep"}, r"--parallelism\.variants: .*got plan-ep;"),
    ],
)
def test_variants_that_are_not_compared_are_refused(changes, error, tmp_path):
    with pytest.raises(UsageError, match=error):
        runs_of(tmp_path, **changes)


def test_a_global_batch_of_one_microbatch_is_refused_where_pipelines_split_it(tmp_path):
    def runs(**own):
        shared = SharedOptions(out=tmp_path, micro_batch=8)
        options = ParallelOptions(models="llama-tiny", **own)
        return EXPERIMENT.runs(EXPERIMENT.setting(shared, options))

    with pytest.raises(UsageError, match="--global-batch: expected at least 16"):
        runs()
    assert runs(variants="plan-tp,pp-GPipe")


def test_bad_options_are_refused(tmp_path):
    with pytest.raises(UsageError, match="unknown model 'nope'"):
        runs_of(tmp_path, models="nope")
    with pytest.raises(UsageError, match=r"--parallelism\.steps is 0"):
        runs_of(tmp_path, steps=0)


def test_plans_have_a_verdict_and_native_runs_have_none(made_up):
    results, section = made_up()
    compared = [each for each in results if each.run.reference]
    assert {each.verdict for each in compared if not each.run.judged} == {Verdict.UNJUDGED}
    assert {each.verdict for each in compared if each.run.judged} == {Verdict.WITHIN}
    assert [row.passes for row in section.verdicts] == [True, True]
    largest = [row.largest for row in section.verdicts]
    assert largest == ["5e-6 nats per token", "5e-6 squared error per pixel"]
    judged = [each for each in compared if each.run.judged and each.model == "dit-tiny"]
    assert f"{len(judged)} runs have one device's losses." in section.verdicts[1].finding
    subject = next(each for each in section.contents if isinstance(each, Paragraph))
    assert "up to 0.5, are shown" in subject.text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"dit_tiny_both_plan_hsdp": FAR},
            "dit-tiny by plan-hsdp (both) exceeds its tolerance: it differs by 0.5",
        ),
        ({"dit_tiny_init_plan_tp": None}, "dit-tiny by plan-tp (random init) ended with exit code"),
        ({"llama_tiny_neither_single": None}, "llama-tiny by ddp (neither), llama-tiny by fsdp1"),
    ],
    ids=["far", "failed", "no reference"],
)
def test_a_failed_run_fails_the_verdict_of_its_model_and_is_named(made_up, change, sentence):
    results, section = made_up(**change)
    assert not all(each.verdict.passes for each in results)
    model = sentence.split(" by", maxsplit=1)[0]
    for row in section.verdicts:
        assert row.passes == (not row.subject.startswith(model))
        assert (sentence in row.finding) == row.subject.startswith(model)


def cells(section):
    """The text of the rows of the table by model and variant, without these."""
    (table,) = (each for each in section.contents if isinstance(each, Table))
    return {
        (row[0], row[1]): [cell.text if isinstance(cell, Cell) else cell for cell in row[2:]]
        for row in table.rows
    }


def test_a_row_has_two_cells_for_each_case(made_up):
    rows = cells(made_up()[1])
    both = ["5e-6", "2.5e-6"]
    assert rows["llama-tiny", "plan-tp"] == [
        *("2", f"1 {TIMES} 4", "1e-5"),
        *(both * 3 + [ABSENT] * 2),
        "yes",
    ]
    assert rows["llama-tiny", "fsdp2 (native)"][-1] == ""
    assert rows["dit-tiny", "pp-1F1B"][-3:-1] == both
    assert ("llama-tiny", "single") not in rows


def test_a_failed_reference_has_a_row(made_up):
    rows = cells(made_up(llama_tiny_neither_single=None)[1])
    assert rows["llama-tiny", "single"][-3:] == ["failed", ABSENT, "no"]
    assert rows["llama-tiny", "ddp"][-3:] == ["not compared", ABSENT, "no"]


def test_the_figure_has_a_column_for_each_model(made_up):
    results = shown_results(made_up()[0])
    for theme in (LIGHT, DARK):
        columns = draw_parallelism(results, theme).get_axes()
        titles = [axes.get_title(loc="left") for axes in columns]
        assert titles == ["llama-tiny: largest |Δ|", "dit-tiny: largest |Δ|"]
        drawn = sum(len(points.get_offsets()) for points in columns[0].collections)
        assert drawn == len([each for each in results if each.model == "llama-tiny"])


def test_the_curves_have_a_panel_for_each_model_and_case(made_up):
    results = shown_results(made_up()[0])
    for theme in (LIGHT, DARK):
        panels = {
            axes.get_title(loc="left"): axes for axes in draw_cases(results, theme).get_axes()
        }
        headings = ("random init", "dropout", "both")
        models = ("llama-tiny", "dit-tiny")
        assert list(panels) == [f"{model}: {case}" for model in models for case in headings]
        for model, case in itertools.product(
            models, (ParallelCase.INIT, ParallelCase.DROPOUT, ParallelCase.BOTH)
        ):
            shown = [
                each for each in results if each.model == model and each.run.labels["case"] == case
            ]
            (*lines, tolerance) = panels[f"{model}: {case.heading}"].get_lines()
            assert len(lines) == len(shown)
            assert set(tolerance.get_ydata()) == {shown[0].run.tolerance}
            for line, result in zip(lines, shown, strict=True):
                found = result.deviation.differences
                assert list(line.get_ydata()) == [max(value, FLOOR) for value in found]
                assert line.get_color() == style_of(result.run.labels["source"], theme).colour


def test_zero_differences_are_drawn_and_infinite_ones_are_left_out(made_up):
    results = shown_results(made_up()[0])
    result = next(each for each in results if each.run.labels["case"] == ParallelCase.INIT)
    deviation = replace(result.deviation, differences=(0.0, math.inf, 1e-6))
    first = draw_cases([replace(result, deviation=deviation)], LIGHT).get_axes()[0]
    zero, lost, small = first.get_lines()[0].get_ydata()
    assert first.get_ylim()[0] < zero < 1e-7
    assert math.isnan(lost)
    assert small == 1e-6


def test_the_terminal_has_a_row_per_model_and_variant(made_up, tmp_path, capsys):
    _, section = made_up()
    print_report(ReportPage("", (section,)), tmp_path, Console(width=100))
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if "plan-dp-tp-sp-static " in line]
    assert len(lines) == 2
    assert lines[0].split() == [
        *("llama-tiny", "plan-dp-tp-sp-static", "4"),
        *("1", TIMES, "4"),
        *(ABSENT, ABSENT, "5e-6", ABSENT),
    ]
