"""The report of one run: its numbers, curves, starts and samples."""

import json
from pathlib import Path

import pytest

import integration.data
from integration.errors import EXIT_USAGE
from integration.report.palette import LIGHT
from integration.report.run import _draw, main
from integration.train.metrics import (
    MetricsFile,
    RunStart,
    RunSummary,
    StepRecord,
    read_starts,
    write_start,
    write_summary,
)
from testkit import run_ranks

RUN = {
    "model": "llama-tiny",
    "data": Path(integration.data.__file__).parent,
    "tokenizer": "bpe:300",
    "eval_samples": 8,
    "eval_every": 1,
    "tensorboard": False,
    "peak_flops": 1e12,
    "micro_batch": 2,
}


def _train(options):
    import torch.distributed as dist

    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.session import restore_torch
    from integration.train.setup import prepare
    from integration.train.stop import StopRequest

    restore_torch()
    world = World(dist.get_rank(), dist.get_world_size())
    trainer = Trainer(prepare(TrainConfig(**RUN | options), world.size), world)
    assert trainer.run(StopRequest())


@pytest.mark.ranks
def test_a_run_that_was_resumed_at_another_product_has_both_and_a_sample(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "report"
    run_ranks(_train, 1, {"out": run, "steps": 2})
    run_ranks(_train, 2, {"out": run, "steps": 4, "system": "plan", "tp": 2, "sp": True})
    capsys.readouterr()
    arguments = [str(run), "--out", str(out), "--prompts", "def ", "x", "--max-tokens", "9"]
    assert main(arguments) == 0
    line = f"report of 4 steps of llama-tiny: {out / 'report.html'}\n"
    assert capsys.readouterr().out == line
    page = (out / "report.md").read_text()
    assert "| 1 | single | 1 |\n| 3 | plan --tp 2 --sp | 2 |" in page
    assert "| tokens | 2,048 |" in page
    assert "| perplexity of held-out samples | " in page
    assert page.count("```text\n") == 2
    assert "```text\ndef " in page
    assert (out / "figures" / "loss.png").stat().st_size > 1000
    again = tmp_path / "again"
    assert main([*arguments[:2], str(again), *arguments[3:], "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["run"], found["report"]) == (str(run), str(again / "report.html"))
    assert found["summary"] == json.loads((run / "summary.json").read_text())
    assert printed.err.count("\n") == 1
    assert (again / "report.md").read_text() == page


def record(step, evaluated):
    return StepRecord(
        step=step, loss=1000.0 - step, seconds=0.5, tokens=64, eval_loss=evaluated or None
    )


def test_the_curves_are_means_of_parts_and_the_evaluations():
    axes = _draw([record(step, 0) for step in range(1, 6)], LIGHT).axes[0]
    (line,) = axes.get_lines()
    assert [*line.get_xydata().ravel()] == [1, 999, 2, 998, 3, 997, 4, 996, 5, 995]
    records = [record(step, step if step % 300 == 0 else 0) for step in range(1, 602)]
    training, held_out = _draw(records, LIGHT).axes[0].get_lines()
    assert len(training.get_xdata()) == 151  # parts of 4 steps
    assert training.get_xydata()[:2].tolist() == [[2.5, 997.5], [6.5, 993.5]]
    assert training.get_xydata()[-1].tolist() == [601, 399]
    assert held_out.get_xydata().tolist() == [[300, 300], [600, 600]]


def test_a_run_without_evaluations_checkpoints_and_starts_has_a_report(tmp_path, capsys):
    metrics = MetricsFile(tmp_path, keep_steps=0)
    metrics.append(record(1, 0))
    metrics.close()
    summary = RunSummary("ddp", "dit-tiny", 1000, 1, 1, 1, 4, 1, "digits", [1])
    write_summary(tmp_path, summary)
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    assert "held-out" not in page.replace("of held-out samples over", "")
    assert "## Samples" not in page


def test_a_folder_without_a_finished_run_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == EXIT_USAGE
    assert "expected the folder of a finished run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_start_replaces_those_at_the_same_and_at_later_steps(tmp_path):
    starts = [RunStart(step, f"system {step}", 2) for step in (0, 20, 40, 20)]
    for start in starts:
        write_start(tmp_path, start)
    assert read_starts(tmp_path) == [starts[0], starts[3]]
    assert read_starts(tmp_path / "nowhere") == []
