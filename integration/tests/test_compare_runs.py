"""The comparison over a stand-in for the trainer: processes, verdicts, exit codes, in no time.

The stand-in writes the files of a run, as told by ``script``: one entry per run folder's name.
"""

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace

import psutil
import pytest

from integration.compare import results_folder, runner
from integration.compare.__main__ import main
from integration.compare.experiment import SharedOptions
from integration.compare.experiments.random_numbers import RandomOptions
from integration.compare.experiments.systems import SystemOptions
from integration.compare.options import CompareOptions
from integration.compare.result import Verdict, compare_runs
from integration.compare.run import Run, TrainingJob
from integration.compare.runner import Outcome
from integration.compare.setup import prepare
from integration.train.config import TrainConfig
from integration.train.stop import EXIT_TERMINATED

STEPS = 5
LOSSES = [5.0, 4.0, 3.5, 3.25, 3.0]

STAND_IN = """#!{python}
import json, os, pathlib, signal, subprocess, sys, time
runs = [sys.argv]
if sys.argv[2] == "integration.train.session":
    runs = json.loads(pathlib.Path(sys.argv[3]).read_text())
for words in runs:
    options = dict(zip(words, words[1:]))
    ranks = int(options["--ranks"])
    out = pathlib.Path(options["--out"])
    script = json.loads(pathlib.Path({script!r}).read_text())[out.name.removeprefix("llama-tiny-")]
    out.mkdir(parents=True)
    print("training", options["--system"], flush=True)
    with (out / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(script["losses"], start=1):
            seconds = 0.5 * ranks
            record = dict(step=step, loss=loss, seconds=seconds, tokens=512)
            file.write(json.dumps(record) + "\\n")
    if script.get("hang"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rank = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (out / "pids").write_text(f"{{os.getpid()}} {{rank.pid}}")
        time.sleep(600)
    if script.get("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    summary = dict(system=options["--system"], model="llama-tiny", parameters=115008,
                   world_size=ranks, data_parallel_degree=ranks, accumulation=1, micro_batch=4,
                   steps=len(script["losses"]), data_source="text",
                   peak_rss_bytes=[2**20 * (400 + rank) for rank in range(ranks)],
                   initial_weights=script.get("weights"), first_masks=script.get("masks"))
    if not script.get("forgetful"):
        (out / "summary.json").write_text(json.dumps(summary))
    if "exit" in script:
        sys.exit(script["exit"])
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Puts the stand-in where Python was; returns the function that tells it what to do."""
    path = tmp_path / "script.json"
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable, script=str(path)))
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    return lambda **systems: path.write_text(json.dumps(systems))


@pytest.fixture
def options(tmp_path):
    (tmp_path / "text").write_bytes(b"real text " * 1000)
    own = SystemOptions(systems="ddp,fsdp2", models="llama-tiny", steps=STEPS)
    shared = SharedOptions(out=tmp_path / "out", data=tmp_path / "text")
    return CompareOptions(shared, {"systems": own}, "systems")


@pytest.fixture
def command(options):
    """Runs the command in this process; puts back the signal handlers that it installs."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.getsignal(number) for number in numbers]
    yield lambda *words, **changes: main([*replace(options, **changes).command_line(), *words])
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


class Watcher:
    """Records the progress of jobs; calls ``on_progress`` when a job has steps."""

    def __init__(self, on_progress=lambda: None):
        self.seen = []
        self._on_progress = on_progress

    def started(self, job):
        self.seen.append(f"{job.name} started")

    def progressed(self, job, record):
        self.seen.append(f"{job.name} at {record.step}")
        self._on_progress()

    def ended(self, outcome):
        self.seen.append(f"{outcome.job.name} ended {outcome.exit_code}")


class Stop:
    requested = False


def ready_runs(options):
    (systems,) = prepare(options).experiments
    results_folder.replace(options.out)
    return systems.runs


def run_and_compare(options):
    runs = ready_runs(options)
    return compare_runs(runs, runner.run_jobs([run.job for run in runs], Watcher(), Stop()))


def passes(results):
    return all(result.verdict.passes for result in results)


def shifted(step, by):
    return [loss + by * (index == step) for index, loss in enumerate(LOSSES, start=1)]


def verdicts(results):
    return [result.verdict for result in results]


def test_the_jobs_run_one_after_another_and_are_watched(script, options):
    script(single={"losses": LOSSES}, ddp={"losses": LOSSES, "exit": 3}, fsdp2={"losses": LOSSES})
    watcher = Watcher()
    outcomes = runner.run_jobs([run.job for run in ready_runs(options)], watcher, Stop())
    assert watcher.seen == [
        f"llama-tiny-{system} {event}"
        for system, code in (("single", 0), ("ddp", 3), ("fsdp2", 0))
        for event in ("started", "at 5", f"ended {code}")
    ]
    assert [outcome.exit_code for outcome in outcomes] == [0, 3, 0]
    assert outcomes[1].job.log.read_text() == "training ddp\n"


def test_equal_and_close_curves_pass(script, options):
    script(single={"losses": LOSSES}, ddp={"losses": LOSSES}, fsdp2={"losses": shifted(4, -5e-6)})
    results = run_and_compare(options)
    assert verdicts(results) == [Verdict.REFERENCE, Verdict.EQUAL, Verdict.WITHIN]
    assert passes(results)
    single, ddp, fsdp2 = results
    assert single.deviation is None
    assert fsdp2.deviation.maximum == pytest.approx(5e-6)
    assert fsdp2.deviation.step == 4
    assert ddp.cost.step_seconds == 2 * single.cost.step_seconds
    assert ddp.cost.peak_rss_max == 401 * 2**20
    assert (ddp.summary.data_parallel_degree, ddp.losses[-1]) == (2, 3.0)


@pytest.mark.parametrize("by", [2e-5, -2e-5, float("nan"), float("inf")])
def test_a_curve_that_leaves_its_tolerance_does_not_pass(script, options, by):
    script(
        single={"losses": LOSSES},
        ddp={"losses": [LOSSES[0], 4.0 + by, *LOSSES[2:]]},
        fsdp2={"losses": LOSSES},
    )
    results = run_and_compare(options)
    assert verdicts(results) == [Verdict.REFERENCE, Verdict.OUTSIDE, Verdict.EQUAL]
    assert not passes(results)
    assert results[1].deviation.step == 2


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"exit": 3}, "ended with exit code 3"),
        ({"killed": True}, "was killed by SIGKILL"),
        ({"losses": LOSSES[:3]}, "exited with code 0 but recorded 3 of 5 steps"),
        ({"losses": []}, "exited with code 0 but recorded 0 of 5 steps"),
        ({"forgetful": True}, "exited with code 0 but wrote unreadable files: .*summary.json"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_run_without_a_whole_result_fails_and_the_others_go_on(script, options, what, reason):
    script(single={"losses": LOSSES}, ddp={"losses": LOSSES} | what, fsdp2={"losses": LOSSES})
    results = run_and_compare(options)
    assert verdicts(results) == [Verdict.REFERENCE, Verdict.FAILED, Verdict.EQUAL]
    assert not passes(results)
    failed = results[1]
    assert (failed.deviation, failed.cost, failed.summary) == (None, None, None)
    assert failed.failure.tail == "training ddp"
    assert failed.failure.log == options.out / "runs" / "systems" / "llama-tiny-ddp.log"
    assert re.match(reason, failed.failure.reason)


def test_steps_that_were_skipped_are_a_failure(tmp_path):
    job = TrainingJob("single", TrainConfig(out=tmp_path, ranks=1, steps=2))
    lines = [{"step": step, "loss": 1.0, "seconds": 1.0, "tokens": 1} for step in (1, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").write_text("{}")
    (result,) = compare_runs([Run(job, "single", 0.0)], [Outcome(job, 0)])
    assert result.verdict is Verdict.FAILED


def test_without_a_reference_nothing_passes(script, options):
    script(single={"losses": LOSSES, "exit": 1}, ddp={"losses": LOSSES}, fsdp2={"losses": LOSSES})
    results = run_and_compare(options)
    assert verdicts(results) == [Verdict.FAILED, Verdict.UNCOMPARED, Verdict.UNCOMPARED]
    assert not passes(results)
    assert results[1].cost is not None


def test_a_stop_request_ends_the_run_and_its_ranks_however_deaf(script, options, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.3)
    script(single={"losses": LOSSES}, ddp={"losses": LOSSES, "hang": True})
    stop = Stop()
    pids = options.out / "runs" / "systems" / "llama-tiny-ddp" / "pids"

    def on_progress():
        if pids.parent.exists():
            while not pids.exists() or len(pids.read_text().split()) < 2:
                time.sleep(0.01)
            stop.requested = True

    watcher = Watcher(on_progress)
    outcomes = runner.run_jobs([run.job for run in ready_runs(options)], watcher, stop)
    assert [outcome.job.system for outcome in outcomes] == ["single"]
    assert watcher.seen[-1] == "llama-tiny-ddp at 5"
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_the_command_stops_on_sigterm_without_a_report(script, options, command, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.3)
    script(single={"losses": LOSSES, "hang": True})
    end = runner._process

    def terminated_at_once(job, log):
        os.kill(os.getpid(), signal.SIGTERM)
        return end(job, log)

    monkeypatch.setattr(runner, "_process", terminated_at_once)
    assert command() == EXIT_TERMINATED
    assert not (options.out / "report.md").exists()


def test_the_command_passes_and_replaces_a_former_result(script, options, command, capsys):
    ready_runs(options)  # is all that it knows a result of its own by
    stale = options.out / "runs" / "stale"
    stale.mkdir()
    script(single={"losses": LOSSES}, ddp={"losses": LOSSES}, fsdp2={"losses": shifted(3, 5e-6)})
    assert command() == 0
    printed = capsys.readouterr()
    assert (
        "passes: The largest difference is that of fsdp2 with llama-tiny at step 3." in printed.out
    )
    assert f"report: {options.out / 'report.html'}" in printed.out
    assert "llama-tiny-ddp: done in" in printed.err
    results = json.loads((options.out / "results.json").read_text())
    assert results["passes"] is True
    assert [each["verdict"] for each in results["experiments"]["systems"]["runs"]] == [
        "reference",
        "bitwise equal",
        "within tolerance",
    ]
    for name in (
        "report.md",
        "report.html",
        "figures/losses-llama-tiny.png",
        "figures/cost-llama-tiny.png",
    ):
        assert (options.out / name).stat().st_size > 1000
    assert not stale.exists()


def test_the_command_fails_clearly_and_still_reports(script, options, command, capsys):
    script(
        single={"losses": LOSSES},
        ddp={"losses": [*LOSSES[:4], float("nan")]},
        fsdp2={"losses": LOSSES[:2], "exit": 9},
    )
    assert command("--json") == 1
    printed = capsys.readouterr()
    log = f"{options.out}/runs/systems/llama-tiny-fsdp2.log"
    assert f"llama-tiny-fsdp2 ended with exit code 9; its log is {log}" in printed.err
    assert "training fsdp2" in printed.err
    assert "DOES NOT PASS" in printed.err
    assert "The loss of ddp with llama-tiny is not finite from step 5 on." in printed.err
    html = (options.out / "report.html").read_text()
    assert "llama-tiny-fsdp2 ended with exit code 9" in html
    assert "training fsdp2" in html
    # Strict JSON, though a loss is not a number.
    text = printed.out
    assert (options.out / "results.json").read_text() == text
    results = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert results["passes"] is False
    assert results["experiments"]["systems"]["runs"][1]["records"][-1]["loss"] == "nan"


def with_random(options):
    return {**options.own, "random_numbers": RandomOptions(steps=STEPS)}


def random_script(**changes):
    """Entries for the systems and for all runs with random numbers, which go as they should."""
    entries = {name: {"losses": LOSSES} for name in ("single", "ddp", "fsdp2")}
    for case, drawn in (("init", "weights"), ("dropout", "masks")):
        right = {"losses": LOSSES, "weights": "w", "masks": "m"}
        entries[f"{case}-single-1-native"] = right
        for ranks in (2, 4):
            other = {"losses": shifted(2, 0.01), drawn: "other"}
            entries[f"{case}-dtensor-tp-{ranks}-native"] = right | other
            entries[f"{case}-dtensor-tp-{ranks}-dist-rng"] = right
    return entries | changes


@pytest.mark.slow
def test_the_command_compares_random_numbers_after_the_systems(script, options, command, capsys):
    script(**random_script())
    assert command(experiments="systems,random_numbers", own=with_random(options)) == 0
    printed = capsys.readouterr()
    started = re.findall(r"^(\S+): \d ranks?, 5 steps$", printed.err, re.MULTILINE)
    assert started[:3] == [f"llama-tiny-{system}" for system in ("single", "ddp", "fsdp2")]
    drawn = ["single-1-native"]
    drawn += [f"dtensor-tp-{n}-{source}" for n in (2, 4) for source in ("native", "dist-rng")]
    # Those that share processes are together.
    assert started[3:] == [f"{case}-{each}" for each in drawn for case in ("init", "dropout")]
    assert "dist-rng on 2 and 4 ranks draws the initial weights" in printed.out
    out = options.out
    results = json.loads((out / "results.json").read_text())
    assert results["passes"] is True
    names = [f"{case}-{each}" for case in ("init", "dropout") for each in drawn]
    assert [each["name"] for each in results["experiments"]["random_numbers"]["runs"]] == names
    for name in names[:5]:  # each has begun the processes that it shares
        assert (out / "runs" / "random_numbers" / f"{name}.log").exists()
    assert (out / "figures" / "random.png").stat().st_size > 1000


def test_other_random_numbers_fail_the_command_though_every_loss_is_right(
    script, options, command, capsys
):
    name = "dropout-dtensor-tp-4-dist-rng"
    entry = {"losses": LOSSES, "weights": "w", "masks": "other"}
    script(**random_script(**{name: entry}))
    assert command(experiments="random_numbers", own=with_random(options)) == 1
    assert "The dropout masks of dist-rng on 4 ranks with dropout" in capsys.readouterr().out
