"""The experiment on diffusion: its runs, and the findings on runs made up here."""

import json
from functools import partial

import pytest
import torch
from rich.console import Console

from integration.compare.experiment import SharedOptions
from integration.compare.experiments import diffusion
from integration.compare.experiments.diffusion import (
    EXPERIMENT,
    JUDGED,
    SAMPLES,
    SHARDED,
    DiffusionOptions,
    draw_diffusion,
    draw_pictures,
    nearest_class,
)
from integration.compare.result import Verdict
from integration.data import Digits
from integration.data.digits import CLASSES
from integration.errors import UsageError
from integration.models import build_model, model_shape
from integration.report.formatting import ABSENT
from integration.report.markdown import render_markdown
from integration.report.palette import DARK, LIGHT
from integration.report.section import ReportPage
from integration.report.terminal import print_report
from integration.sampling import Sampling, digits_in_turn
from integration.train.config import parse_config

STEPS = JUDGED + 10
LOSSES = [1.0 + 1 / step for step in range(1, STEPS + 1)]


def moved(step, by):
    """The losses, with that of one step, counted from 1, moved."""
    return [loss + by * (place == step) for place, loss in enumerate(LOSSES, start=1)]


def untrained(path):
    """A model for a made-up checkpoint; the sharded run's differs in one weight."""
    model = build_model(model_shape("dit-tiny"), seed=0).model.eval()
    if SHARDED in str(path):
        with torch.no_grad():
            model.final_layer.linear.bias[0] += 1e-3
    return model


def write_checkpoint(folder):
    folder = folder / "checkpoints" / f"step-{STEPS:08}"
    folder.mkdir(parents=True)
    identity = dict.fromkeys(("model", "data_fingerprint", "sequence_length", "global_batch"), 1)
    manifest = {"step": STEPS, "world_size": 1, "identity": identity | {"seed": 0}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def made_up(made_up_results, tmp_path, monkeypatch):
    """Both runs, the second close to the first.

    Keywords ``single`` and ``plan`` are losses, None of a failed run; returns results and findings.
    """
    monkeypatch.setattr(diffusion, "load_dit", untrained)
    # Untrained models draw noise in any number of steps; test_sampling.py has the default's.
    monkeypatch.setattr(diffusion, "Sampling", partial(Sampling, steps=2))

    def results(**changes):
        def describe(run):
            usual = LOSSES if run.reference is None else moved(20, 5e-6)
            losses = changes.get(run.job.system.split("-", maxsplit=1)[0], usual)
            return {"losses": losses or LOSSES[:1], "exit": 0 if losses else 7}

        own = DiffusionOptions(steps=STEPS)
        setting, results = made_up_results(EXPERIMENT, own, tmp_path, describe)
        for result in results:
            write_checkpoint(result.run.job.folder)
        return results, EXPERIMENT.report(setting, results)

    return results


def runs_of(out, own, **shared):
    return EXPERIMENT.runs(EXPERIMENT.setting(SharedOptions(out=out, **shared), own))


def test_the_same_batches_train_on_one_device_and_sharded_and_leave_a_checkpoint(tmp_path):
    runs = runs_of(tmp_path, DiffusionOptions(steps=200), seed=3, data=tmp_path, threads=2)
    assert [(run.job.system, run.job.ranks) for run in runs] == [("single", 1), (SHARDED, 2)]
    for run in runs:
        config = parse_config(run.job.arguments)
        assert (config.model, config.steps, config.seed) == ("dit-small", 200, 3)
        assert (config.final_checkpoint, config.resume, config.data) == (True, "never", None)
        assert (config.global_batch, config.micro_batch, config.threads) == (64, 64, 2)
        assert (config.warmup_steps, config.decay_steps) == (10, 100)
        assert (config.out, run.tolerance) == (run.job.folder, 1e-5)
        assert run.job.folder.parent == tmp_path / "runs" / "diffusion"
    assert (config.tp, config.sp, config.static) == (2, True, True)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (DiffusionOptions(steps=0), r"--diffusion\.steps is 0"),
        (DiffusionOptions(model="nope"), r"unknown model 'nope'"),
        (DiffusionOptions(model="llama-tiny"), r"--diffusion\.model: expected a DiT.* --exper"),
    ],
    ids=["steps", "model", "family"],
)
def test_bad_options_are_refused(tmp_path, own, message):
    with pytest.raises(UsageError, match=message):
        runs_of(tmp_path, own)


def test_an_image_is_of_the_class_that_its_nearest_image_has():
    digits = Digits(seed=0)
    images, classes = digits.images, digits.classes
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(nearest_class(images + noise / 100, digits), classes)
    others = torch.cdist(images.flatten(1), images.flatten(1)).fill_diagonal_(torch.inf)
    right = classes[others.argmin(dim=1)] == classes
    assert round(100 * right.float().mean().item(), 1) == 98.8  # what its docstring says


def test_first_steps_are_judged_and_later_ones_and_images_are_shown(made_up):
    results, findings = made_up(plan=moved(JUDGED + 1, 0.25))
    single, sharded = results
    assert (single.verdict, sharded.verdict) == (Verdict.REFERENCE, Verdict.EQUAL)
    assert len(sharded.deviation.differences) == sharded.run.first_steps == JUDGED
    assert (sharded.whole.maximum, sharded.whole.step) == (pytest.approx(0.25), JUDGED + 1)
    pictures = draw_pictures(results)
    assert [drawn.system for drawn in pictures.drawn] == ["single", SHARDED]
    first, second = (drawn.images for drawn in pictures.drawn)
    assert first.shape == (SAMPLES * CLASSES, 1, 8, 8)
    assert pictures.difference == (first - second).abs().max().item() > 0
    right = nearest_class(first, Digits(seed=0)) == digits_in_turn(SAMPLES)
    assert pictures.drawn[0].recognised == right.sum().item()
    assert findings.numbers["difference"] == pictures.difference
    assert findings.numbers["recognised"].keys() == {"single", SHARDED}
    assert findings.numbers["images"] == 60


def test_the_real_images_are_of_the_digits_in_turn(made_up):
    real = draw_pictures(made_up()[0]).real
    assert torch.equal(nearest_class(real, Digits(seed=0)), digits_in_turn(SAMPLES))
    assert len(real.flatten(1).unique(dim=0)) == SAMPLES * CLASSES


@pytest.mark.parametrize(
    ("changes", "sentence", "drawn"),
    [
        (
            {"plan": moved(JUDGED, 2e-5)},
            f"dit-small by {SHARDED} exceeds its tolerance: it differs by 2e-5 squared error per"
            " pixel at step 50, and the tolerance is 1e-5. Pixels of the images",
            2,
        ),
        (
            {"plan": None},
            f"dit-small by {SHARDED} ended with exit code 7; see diffusion-{SHARDED}.log.",
            1,
        ),
        (
            {"single": None},
            "dit-small by single ended with exit code 7; see diffusion-single.log."
            f" dit-small by {SHARDED} was not compared, as dit-small by single failed.",
            1,
        ),
    ],
    ids=["far", "failed", "no reference"],
)
def test_a_failed_run_fails_the_verdict_and_is_named(made_up, changes, sentence, drawn):
    results, findings = made_up(**changes)
    (section,) = findings.sections
    (row,) = section.verdicts
    assert row.passes is False
    assert row.finding.startswith(sentence)
    assert [each.failure is None for each in results].count(True) == drawn
    assert len(findings.numbers["recognised"]) == drawn
    lines = render_markdown(ReportPage("report", (section,))).splitlines()
    absent = [line for line in lines if line.startswith("| ") and line.endswith(f"{ABSENT} |")]
    assert len(absent) == 2 - drawn


def test_the_verdict_names_the_differences_of_losses_and_images(made_up):
    _, findings = made_up()
    (row,) = findings.sections[0].verdicts
    assert (row.passes, row.tolerance) == (True, "1e-5")
    assert row.largest == "5e-6 squared error per pixel"
    assert row.finding.startswith(
        f"The largest difference is that of dit-small by {SHARDED} at step 20. Pixels"
    )
    assert "generate from the same noise differ by at most" in row.finding


@pytest.mark.parametrize(
    "failed",
    [
        {"plan": None},
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({}, {"single": None})),
    ],
    ids=str,
)
def test_the_figure_has_a_grid_for_the_data_and_for_each_run_that_drew(made_up, failed):
    results, _ = made_up(**failed)
    pictures = draw_pictures(results)
    for theme in (LIGHT, DARK):
        *grids, losses, differences = draw_diffusion(results, pictures, theme).get_axes()
        shown = [axes for axes in grids if axes.get_images()]
        assert [axes.get_title(loc="left") for axes in shown] == [
            "real images",
            *(f"generated by {drawn.system}" for drawn in pictures.drawn),
        ]
        pixels = shown[1].get_images()[0].get_array()
        assert pixels.shape == (SAMPLES * 10, CLASSES * 10)
        # The third image of a 4: row 2, column 4, within its frame.
        image = torch.from_numpy(pixels[21:29, 41:49].data)
        assert torch.equal(image, pictures.drawn[0].images[24, 0])
        assert pixels.mask[20].all()
        assert len(losses.get_lines()) == 2
        first = differences.get_lines()[0].get_ydata()
        if not failed:
            assert max(first[19:20]) == pytest.approx(5e-6, rel=1e-3)


def test_the_table_has_a_row_per_run_and_fits_eighty_columns(made_up, tmp_path, capsys):
    (section,) = made_up()[1].sections
    report = ReportPage("report", (section,))
    lines = [line for line in render_markdown(report).splitlines() if line.endswith("of 60 |")]
    assert len(lines) == 2
    print_report(report, tmp_path / "report.html", Console(width=80))
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in printed if line.endswith("of 60")]
    assert [row[0] for row in rows] == ["single", SHARDED]
    assert rows[1][1:4] == ["within", "tolerance", "5e-6"]
