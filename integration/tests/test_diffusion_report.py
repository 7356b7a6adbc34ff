"""The comparison of images: its jobs, what runs made up here come to, and what is said."""

import json
import re

import pytest
import torch
from rich.console import Console

from integration.compare import diffusion
from integration.compare.diffusion import JUDGED, SAMPLES, collect_diffusion, nearest_class
from integration.compare.diffusion_jobs import diffusion_jobs
from integration.compare.options import CompareOptions
from integration.compare.results import Results, Verdict, write_results
from integration.compare.runner import Outcome
from integration.compare.setup import Comparison, DataFacts, prepare
from integration.data import Digits
from integration.data.digits import CLASSES
from integration.errors import UsageError
from integration.metrics import MetricsFile, RunSummary, StepRecord, write_summary
from integration.models import build_model, model_shape
from integration.report.comparison import write_report
from integration.report.comparison_terminal import print_results
from integration.report.diffusion_figure import draw_diffusion
from integration.report.diffusion_text import diffusion_finding, diffusion_rows, diffusion_text
from integration.report.formatting import ABSENT
from integration.report.palette import DARK, LIGHT
from integration.sampling import digits_in_turn
from integration.train.config import parse_config

STEPS = JUDGED + 10
LOSSES = [1.0 + 1 / step for step in range(1, STEPS + 1)]
WAY = "plan-tp-sp-static"


def moved(step, by):
    """The losses, with that of one step, counted from 1, moved."""
    return [loss + by * (place == step) for place, loss in enumerate(LOSSES, start=1)]


def made_up(out, monkeypatch, **changes):
    """Both runs, the second close to the first; ``changes`` are losses by way, None: failed."""
    jobs = diffusion_jobs(CompareOptions(out=out, diffusion_steps=STEPS))
    outcomes = []
    for job, usual in zip(jobs, (LOSSES, moved(20, 5e-6)), strict=True):
        losses = changes.get(job.system.split("-", maxsplit=1)[0], usual)
        write_run(job, losses or LOSSES[:1])
        outcomes.append(Outcome(job, 0 if losses else 7))
    monkeypatch.setattr(diffusion, "load_dit", untrained)
    return jobs, collect_diffusion("dit-small", jobs, outcomes)


def untrained(path):
    """A model for a made-up checkpoint; the sharded run's differs in one weight."""
    model = build_model(model_shape("dit-tiny"), seed=0).model.eval()
    if WAY in str(path):
        with torch.no_grad():
            model.final_layer.linear.bias[0] += 1e-3
    return model


def write_run(job, losses):
    job.folder.mkdir(parents=True)
    job.log.write_text("Traceback: <broken> & gone\n")
    metrics = MetricsFile(job.folder, keep_steps=0)
    for step, loss in enumerate(losses, start=1):
        metrics.append(StepRecord(step=step, loss=loss, seconds=0.5, tokens=512))
    metrics.close()
    summary = RunSummary(
        system=job.system,
        model="dit-small",
        parameters=239940,
        world_size=job.ranks,
        data_parallel_degree=1,
        accumulation=1,
        micro_batch=4,
        steps=len(losses),
        data_source="scikit-learn's handwritten digits",
        peak_rss_bytes=[2**20] * job.ranks,
    )
    write_summary(job.folder, summary)
    folder = job.folder / "checkpoints" / "step-00000060"
    folder.mkdir(parents=True)
    identity = dict.fromkeys(("model", "data_fingerprint", "sequence_length", "global_batch"), 1)
    manifest = {"step": STEPS, "world_size": 1, "identity": identity | {"seed": 0}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def whole(out, monkeypatch, **changes):
    """A comparison that was of images only, and its results."""
    jobs, result = made_up(out, monkeypatch, **changes)
    options = CompareOptions(out=out, systems="ddp")
    asked = Comparison(options, jobs, (), (DataFacts("text", 1, "abc"),), diffusion_jobs=jobs)
    return asked, Results(result.runs, (), diffusion=result)


def test_the_same_batches_train_on_one_device_and_sharded_and_leave_a_checkpoint(tmp_path):
    given = CompareOptions(out=tmp_path, diffusion_steps=200, seed=3, data=tmp_path, threads=2)
    jobs = diffusion_jobs(given)
    assert [(job.system, job.ranks) for job in jobs] == [("single", 1), (WAY, 2)]
    for job in jobs:
        config = parse_config(job.arguments)
        assert (config.model, config.steps, config.seed) == ("dit-small", 200, 3)
        assert (config.final_checkpoint, config.resume, config.data) == (True, "never", None)
        assert (config.global_batch, config.micro_batch, config.threads) == (64, 64, 2)
        assert (config.warmup_steps, config.decay_steps) == (10, 100)
        assert (config.out, job.tolerance) == (job.folder, 1e-5)
        assert job.folder.parent == tmp_path / "runs" / "diffusion"
    assert (config.tp, config.sp, config.static) == (2, True, True)


def test_images_come_at_last(tmp_path):
    options = CompareOptions(out=tmp_path, systems="ddp", models="llama-tiny", diffusion_steps=20)
    comparison = prepare(options)
    assert comparison.all_jobs[-2:] == comparison.diffusion_jobs
    names = [job.name for job in comparison.all_jobs]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"diffusion_steps": 0}, r"--diffusion-steps is 0"),
        ({"diffusion_model": "nope"}, r"unknown model 'nope'"),
        ({"diffusion_model": "llama-tiny"}, r"expected a DiT, got llama-tiny, .* --no-diffusion"),
    ],
    ids=["steps", "model", "family"],
)
def test_bad_options_are_refused_and_do_not_matter_where_it_is_left_out(tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        diffusion_jobs(CompareOptions(out=tmp_path, **change))
    assert diffusion_jobs(CompareOptions(out=tmp_path, diffusion=False, **change)) == ()
    assert collect_diffusion("dit-small", (), []) is None


def test_an_image_is_of_the_class_that_its_nearest_image_has():
    digits = Digits(seed=0)
    images, classes = digits.images, digits.classes
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(nearest_class(images + noise / 100, digits), classes)
    others = torch.cdist(images.flatten(1), images.flatten(1)).fill_diagonal_(torch.inf)
    right = classes[others.argmin(dim=1)] == classes
    assert round(100 * right.float().mean().item(), 1) == 98.8  # what its docstring says


def test_first_steps_are_judged_and_later_ones_and_images_are_shown(tmp_path, monkeypatch):
    _, result = made_up(tmp_path, monkeypatch, plan=moved(JUDGED + 1, 0.25))
    single, sharded = result.runs
    assert (single.verdict, sharded.verdict) == (Verdict.REFERENCE, Verdict.EQUAL)
    assert len(sharded.deviation.differences) == result.judged == JUDGED
    assert (result.whole.maximum, result.whole.step) == (pytest.approx(0.25), JUDGED + 1)
    assert Results((), (), diffusion=result).passes
    assert [drawn.system for drawn in result.drawn] == ["single", WAY]
    first, second = (drawn.images for drawn in result.drawn)
    assert first.shape == (SAMPLES * CLASSES, 1, 8, 8)
    assert result.difference == (first - second).abs().max().item() > 0
    right = nearest_class(first, Digits(seed=0)) == digits_in_turn(SAMPLES)
    assert result.drawn[0].recognised == right.sum().item()


def test_the_real_images_are_of_the_digits_in_turn(tmp_path, monkeypatch):
    _, result = made_up(tmp_path, monkeypatch)
    assert torch.equal(nearest_class(result.real, Digits(seed=0)), digits_in_turn(SAMPLES))
    assert len(result.real.flatten(1).unique(dim=0)) == SAMPLES * CLASSES


@pytest.mark.parametrize(
    ("changes", "sentence", "drawn"),
    [
        (
            {"plan": moved(JUDGED, 2e-5)},
            f"dit-small by {WAY} exceeds its tolerance: it differs by 2e-5 squared error per pixel"
            " at step 50, and the tolerance is 1e-5. Pixels of the images",
            2,
        ),
        ({"plan": None}, f"dit-small by {WAY} ended with exit code 7; see diffusion-{WAY}.log.", 1),
        (
            {"single": None},
            "dit-small by single ended with exit code 7; see diffusion-single.log."
            f" dit-small by {WAY} was not compared, as the run on one device failed.",
            1,
        ),
    ],
    ids=["far", "failed", "no reference"],
)
def test_a_failed_run_fails_the_comparison_and_is_named(
    tmp_path, monkeypatch, changes, sentence, drawn
):
    asked, results = whole(tmp_path, monkeypatch, **changes)
    assert not results.passes
    assert diffusion_finding(results.diffusion).startswith(sentence)
    assert len(results.diffusion.drawn) == drawn
    assert "Does not pass" in write_report(asked, results, []).read_text()
    assert (results.failures == []) == (drawn == 2)
    absent = [row.recognised for row in diffusion_rows(results.diffusion)].count(ABSENT)
    assert absent == 2 - drawn


def test_the_finding_names_the_differences_of_losses_and_images(tmp_path, monkeypatch):
    _, result = made_up(tmp_path, monkeypatch)
    found = diffusion_finding(result)
    assert found.startswith(f"dit-small by {WAY} stays within 5e-6 of one device's loss for 50")
    assert "generate from the same noise differ by at most" in found
    assert diffusion_finding(None) == ""
    text = diffusion_text(result)
    assert (
        "dit-small (0.2 M parameters), was trained for 60 steps on scikit-learn's" in text.subject
    )
    assert "up to 5e-6 (step 20)" in text.note


def test_the_results_file_holds_every_run_and_no_pixels(tmp_path, monkeypatch):
    _, results = whole(tmp_path, monkeypatch)
    write_results(tmp_path / "results.json", results, {})
    found = json.loads((tmp_path / "results.json").read_text())["pictures"]
    assert [run["system"] for run in found["runs"]] == ["single", WAY]
    assert found["difference"] == results.diffusion.difference
    assert found["recognised"].keys() == {"single", WAY}
    assert (found["pictures"], found["judged_steps"], found["whole"]["step"]) == (60, 50, 20)
    write_results(tmp_path / "results.json", Results(results.systems, ()), {})
    assert json.loads((tmp_path / "results.json").read_text())["pictures"] is None


@pytest.mark.parametrize("failed", [{}, {"plan": None}, {"single": None}], ids=str)
def test_the_figure_has_a_grid_for_the_data_and_for_each_run_that_drew(
    tmp_path, monkeypatch, failed
):
    _, result = made_up(tmp_path, monkeypatch, **failed)
    for theme in (LIGHT, DARK):
        *grids, losses, differences = draw_diffusion(result, theme).get_axes()
        shown = [axes for axes in grids if axes.get_images()]
        assert [axes.get_title(loc="left") for axes in shown] == [
            "real images",
            *(f"generated by {drawn.system}" for drawn in result.drawn),
        ]
        pixels = shown[1].get_images()[0].get_array()
        assert pixels.shape == (SAMPLES * 10, CLASSES * 10)
        # The third image of a 4: row 2, column 4, within its frame.
        image = torch.from_numpy(pixels[21:29, 41:49].data)
        assert torch.equal(image, result.drawn[0].images[24, 0])
        assert pixels.mask[20].all()
        assert len(losses.get_lines()) == 2
        first = differences.get_lines()[0].get_ydata()
        if not failed:
            assert max(first[19:20]) == pytest.approx(5e-6, rel=1e-3)


def test_the_pages_hold_the_section_and_only_where_it_ran(tmp_path, monkeypatch):
    asked, results = whole(tmp_path, monkeypatch)
    html = write_report(asked, results, []).read_text()
    page = (tmp_path / "report.md").read_text()
    assert "<h2>Diffusion</h2>" in html
    section = html[html.index("<h2>Diffusion</h2>") :]
    assert len(re.findall(r"<td>\d+ of 60</td>", section)) == 2
    assert (tmp_path / "figures" / "diffusion.png").read_bytes().startswith(b"\x89PNG")
    section = page[page.index("## Diffusion") : page.index("## Lines of code")]
    lines = re.findall(r"^\|.*\|$", section, re.MULTILINE)
    assert len(lines) == 4
    assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1
    without = write_report(asked, Results(results.systems, ()), []).read_text()
    assert "<h2>Diffusion</h2>" not in without
    assert "## Diffusion" not in (tmp_path / "report.md").read_text()


def test_the_terminal_has_a_line_per_run_in_eighty_columns(tmp_path, monkeypatch, capsys):
    _, results = whole(tmp_path, monkeypatch)
    print_results(results, tmp_path / "report.html", Console(width=80))
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in printed if line.startswith("dit-small ")]
    assert [row[:2] for row in rows[:2]] == [["dit-small", "single"], ["dit-small", WAY]]
    assert rows[1][2:5] == ["within", "tolerance", "5e-6"]
    assert rows[1][-2:] == ["of", "60"]
