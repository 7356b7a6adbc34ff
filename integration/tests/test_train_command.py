"""The train command as a user runs it: processes, signals, exit codes, files."""

import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from integration.errors import EXIT_LOST
from integration.systems import SYSTEM_NAMES
from integration.train.__main__ import main
from integration.train.checkpoint.checkpoint import newest_complete
from integration.train.config import NATIVE_RANDOM
from integration.train.metrics import read_metrics, read_summary
from integration.train.stop import EXIT_TERMINATED
from testkit import run_python, start_python

pytestmark = pytest.mark.ranks

STEPS = 100  # so many that a test which is late still finds the run under way
EVERY = 10  # steps between checkpoints
TINY = ["--model", "llama-tiny", "--steps", str(STEPS), "--checkpoint-every", str(EVERY)]


def command(out, *options):
    return [sys.executable, "-m", "integration.train", "--out", str(out), *TINY, *options]


def train(out, *options, check=0):
    """Runs the command; returns what it prints to stderr."""
    result = run_python(*command(out, *options)[1:], timeout=180)
    assert result.returncode == check, result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def train_ranks(start_on_ranks):
    """Runs the command on ranks of the environment; returns the ended processes."""

    def train_ranks(out, *options, check=0):
        started = start_on_ranks(2, *command(out, *options)[1:])
        ended = [process.wait(timeout=180) for process in started]
        assert [each.returncode for each in ended] == [check] * 2, ended
        return ended

    return train_ranks


def losses(out):
    return [(record.step, record.loss) for record in read_metrics(out)]


def start_and_wait_for_step(out, step, *options):
    process = start_python(*command(out, *options)[1:])
    wait_for_step(out, step, process)
    return process


def wait_for_step(out, step, process):
    deadline = time.monotonic() + 120
    while not (records := read_metrics(out)) or records[-1].step < step:
        assert process.poll() is None, "the run ended before it could be interrupted"
        assert time.monotonic() < deadline, f"no step {step} within two minutes"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(train_ranks, tmp_path_factory):
    """A run of two DDP ranks that nothing interrupts."""
    out = tmp_path_factory.mktemp("undisturbed")
    first, second = train_ranks(out, "--system", "ddp", "--json")
    assert second.stdout == ""
    (out / "result.json").write_text(first.stdout)
    return out


def test_the_result_is_json_on_the_stdout_of_the_first_rank(undisturbed):
    result = json.loads((undisturbed / "result.json").read_text())
    records = read_metrics(undisturbed)
    assert (result["out"], result["finished"], result["step"]) == (str(undisturbed), True, STEPS)
    assert result["loss"] == records[-1].loss
    assert result["tokens"] == STEPS * 8 * 64
    assert result["seconds"] == pytest.approx(sum(record.seconds for record in records))
    assert result["summary"] == json.loads((undisturbed / "summary.json").read_text())


def test_an_undisturbed_run_writes_what_it_promises(undisturbed):
    assert [step for step, _ in losses(undisturbed)] == list(range(1, STEPS + 1))
    # An untrained model knows nothing of a byte: the mean over ranks is ln 256, not their sum.
    assert losses(undisturbed)[0][1] == pytest.approx(math.log(256), abs=0.2)
    summary = read_summary(undisturbed)
    assert (summary.system, summary.world_size, summary.accumulation) == ("ddp", 2, 1)
    assert len(summary.peak_rss_bytes) == 2
    assert newest_complete(undisturbed).path.name == f"step-{STEPS:08d}"
    assert list((undisturbed / "tensorboard").glob("events.*"))


@dataclass(frozen=True)
class Interrupted:
    """What was seen of a run that was stopped, continued, killed and continued.

    Attributes:
        out: folder of the run.
        refusal: what a second job of the same folder printed while the run was suspended.
        codes: exit codes of its ranks behind SIGTERM.
        printed: what its ranks printed to stdout.
        stopped_at: its last step then.
        newest: name of its newest checkpoint then.
        left: ranks that still ran 10 s after their launcher was killed.
        reached: the last step of the killed run.
        resumed: what the last continuation printed.
    """

    out: Path
    refusal: str
    codes: set[int]
    printed: list[str]
    stopped_at: int
    newest: str
    left: list[psutil.Process]
    reached: int
    resumed: str


@pytest.fixture(scope="module")
def interrupted(start_on_ranks, train_ranks, tmp_path_factory):
    out, options = tmp_path_factory.mktemp("interrupted"), ["--system", "ddp"]
    ranks = start_on_ranks(2, *command(out, *options)[1:])
    wait_for_step(out, 5, ranks[0])
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)  # the run is under way for as long as the second job takes
    refusal = train(out, *options, check=2)
    for rank in ranks:
        rank.send_signal(signal.SIGCONT)
        rank.send_signal(signal.SIGTERM)  # all get it, as torchrun's agent does
    ended, stopped_at = [rank.wait(60) for rank in ranks], losses(out)[-1][0]
    codes, printed = {each.returncode for each in ended}, [each.stdout for each in ended]
    newest = newest_complete(out).path.name

    process = start_and_wait_for_step(out, stopped_at + 2, *options, "--ranks", "2")
    ranks = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    left = psutil.wait_procs(ranks, timeout=10)[1]
    reached = losses(out)[-1][0]
    resumed = train_ranks(out, "--system", "ddp")[0].stderr
    return Interrupted(out, refusal, codes, printed, stopped_at, newest, left, reached, resumed)


def test_a_second_job_in_a_run_folder_is_refused(interrupted):
    assert re.fullmatch(
        rf"error: another job writes {interrupted.out} \(process \d+ on \S+, since [\d :-]+\);"
        r" wait until it ends, or give another --out\n",
        interrupted.refusal,
    )


def test_sigterm_ends_a_run_with_a_checkpoint(interrupted):
    assert interrupted.codes == {EXIT_TERMINATED}
    assert interrupted.stopped_at < STEPS, "the signal came too late to prove anything"
    assert interrupted.newest == f"step-{interrupted.stopped_at:08d}"
    line, *others = interrupted.printed
    assert re.fullmatch(
        rf"stopped at step {interrupted.stopped_at}, loss \d\.\d{{4}}, [\d,]+ tokens/s:"
        rf" {interrupted.out}\n",
        line,
    )
    assert others == [""]


def test_ranks_end_with_a_killed_launcher(interrupted):
    # They are in sessions of their own; going on they would write beside the resumed run.
    assert interrupted.left == []


def test_a_stopped_and_killed_run_continues_with_the_losses_of_an_undisturbed_one(
    undisturbed, interrupted
):
    stopped_at, reached = interrupted.stopped_at, interrupted.reached
    assert stopped_at < reached < STEPS, "the kill came too late to prove anything"
    resumed_at = int(re.search(r"resumed from .* at step (\d+)\n", interrupted.resumed)[1])
    assert stopped_at <= resumed_at <= reached
    assert losses(interrupted.out) == losses(undisturbed)


@pytest.mark.slow  # test_launch_scripts trains under torchrun's agent
def test_torchrun_starts_the_same_run(undisturbed, tmp_path):
    subprocess.run(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            *["-m", "integration.train", "--out", str(tmp_path), *TINY, "--system", "ddp"],
        ],
        check=True,
        capture_output=True,
        timeout=180,
    )
    assert losses(tmp_path) == losses(undisturbed)


@pytest.mark.slow  # test_launch_scripts shows it under this package's agent
def test_under_torchrun_bad_input_is_one_sentence_too(tmp_path):
    result = subprocess.run(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            *["-m", "integration.train", "--out", str(tmp_path / "run"), "--system", "fsdp3"],
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.stderr.count("error: unknown system 'fsdp3'; choose one of: ") == 1
    assert "exitcode: 2" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_overwritten(undisturbed, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(undisturbed, out)
    message = train(out, "--model", "llama-10m", check=2)
    assert message.count("\n") == 1
    assert (
        "belongs to another run: model.hidden_size: expected 384, as in this run, got 64" in message
    )
    assert losses(out) == losses(undisturbed)


def test_damaged_checkpoints_are_named_and_automatic_resume_takes_the_one_before(
    undisturbed, train_ranks, tmp_path
):
    out = tmp_path / "copy"
    shutil.copytree(undisturbed, out)
    flipped, truncated = (
        out / "checkpoints" / f"step-{step:08d}" for step in (STEPS, STEPS - EVERY)
    )
    shard = sorted(flipped.glob("*.distcp"))[-1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 4
    shard.write_bytes(content)
    short = next(truncated.glob("*.distcp"))
    os.truncate(short, short.stat().st_size - 1)
    options = ["--system", "ddp"]
    named = train_ranks(out, *options, "--resume", str(flipped), check=2)[0].stderr
    assert f"checkpoint {flipped} is damaged: {shard.name}: expected checksum" in named
    automatic = train_ranks(out, *options)[0].stderr
    assert f"skipped: checkpoint {flipped} is damaged: {shard.name}" in automatic
    assert f"skipped: checkpoint {truncated} is truncated: {short.name}: expected" in automatic
    assert f"at step {STEPS - 2 * EVERY}" in automatic
    assert losses(out) == losses(undisturbed)


def test_training_features_together(train_ranks, tmp_path):
    options = ["--system", "fsdp2", "--steps", "8", "--checkpoint-every", "2"]
    features = [
        *["--activation-checkpointing", "full", "--dtype", "bf16", "--checkpoint-async"],
        *["--keep-checkpoints", "2", "--profile-steps", "3:4", "--peak-flops", "1e12"],
    ]
    train_ranks(tmp_path, *options, *features)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000008"]
    profiled = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert profiled == [
        f"rank{rank}.{kind}" for rank in (0, 1) for kind in ("memory.txt", "pt.trace.json")
    ]
    for record in read_metrics(tmp_path):
        assert record.tokens_per_second == record.tokens / record.seconds
        # 8 x 64 tokens need 3.5e8 FLOPs; see test_throughput.
        assert record.mfu == pytest.approx(352321536 / record.seconds / 2e12)
    assert not (tmp_path / "flight-recorder").exists()


@pytest.mark.slow  # waits for a timeout; test_watchdog has the report
def test_a_hanging_rank_leaves_reports_of_the_other_ranks(start_on_ranks, tmp_path):
    features = ["--timeout", "15", "--system", "ddp", "--steps", "100000"]
    first, stopped = start_on_ranks(2, *command(tmp_path, *features)[1:])
    wait_for_step(tmp_path, 2, first)
    stopped.send_signal(signal.SIGSTOP)
    path = tmp_path / "flight-recorder" / "report-rank0.txt"
    try:
        deadline = time.monotonic() + 120
        while not path.exists() or "RuntimeError: " not in path.read_text():
            assert time.monotonic() < deadline, "no report of the error within two minutes"
            time.sleep(0.1)
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert first.wait(60).returncode == 1
    assert stopped.wait(60).returncode == 1
    report = path.read_text()
    assert "it has not ended within 13.5 s\n  at " in report
    assert "\nrank 1 gave no answer: " in report
    # Which one depends on where the other stood still; a checkpoint's barrier has no tensors.
    collective = r"(barrier|\w+ of \w+ \[.*\])"
    assert re.search(rf"\n  newest collective of group .* number \d+, {collective}, st", report)
    assert (tmp_path / "flight-recorder" / "rank0").stat().st_size > 0


def test_a_killed_rank_is_named_by_the_others(start_on_ranks, tmp_path):
    options = ["--system", "ddp", "--timeout", "120"]
    first, second = start_on_ranks(2, *command(tmp_path, *options)[1:])
    wait_for_step(tmp_path, 1, first)
    second.send_signal(signal.SIGKILL)
    assert second.wait(timeout=60).returncode == -signal.SIGKILL
    ended = first.wait(timeout=60)
    assert ended.returncode == EXIT_LOST
    sentence = ended.stderr.splitlines()[-1]
    lost = r"error: rank 0 of 2 stopped: rank 1 on 127\.0\.0\.1 \(.*\) ended \(.*\); restart all"
    assert re.match(lost, sentence), ended.stderr


@pytest.mark.parametrize(
    "ranks",
    [[], pytest.param(["--system", "ddp", "--ranks", "2"], marks=pytest.mark.slow)],
    ids=["1 rank", "2 ranks"],
)
def test_a_loss_that_is_not_finite_ends_a_run_with_the_checkpoint_before(tmp_path, ranks):
    message = train(tmp_path, *ranks, "--learning-rate", "1e25", check=2)
    sentence = message.splitlines()[-1]
    step = int(re.search(r"^error: the loss of step (\d+) is (nan|inf)", sentence)[1])
    path = newest_complete(tmp_path).path
    assert path.name == f"step-{step - 1:08d}"
    assert f"the checkpoint of step {step - 1} is {path}: resume" in sentence
    assert f"(the step has samples {8 * step - 8} to {8 * step - 1})" in sentence
    assert [number for number, _ in losses(tmp_path)] == list(range(1, step))
    # The checkpoint is from before the step: going on comes to it again.
    again = train(tmp_path, *ranks, "--learning-rate", "1e25", check=2)
    assert sentence in again.splitlines()


@pytest.fixture
def data(tmp_path):
    """Paths of data that is too short, by the words for them in options."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_bytes(b"x" * 63)
    return {"EMPTY": str(tmp_path / "empty"), "SHORT": str(tmp_path / "short")}


RANKS = ["--system", "ddp", "--ranks", "2"]


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, data):
    message = train(tmp_path / "run", "--data", data["SHORT"], check=2)
    assert_one_sentence(message, "the data has 63 bytes, fewer than the 512 of one global batch")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--data", "EMPTY"], "contains no bytes to train on"),
        (["--data", "EMPTY", *RANKS], "contains no bytes to train on"),
        (["--data", "SHORT", *RANKS], "the data has 63 bytes, fewer"),
        (["--out", "/proc/none/run"], "cannot write /proc/none/run (No such file"),
        (["--out", "/proc/none/run", *RANKS], "cannot write /proc/none"),
        (["--system", "fsdp3"], "unknown system 'fsdp3'"),
        (["--warmup-steps", "70", "--decay-steps", "40"], "expected a sum of at most --steps, 100"),
    ],
)
def test_bad_input_is_refused_before_a_rank_starts(tmp_path, data, options, sentence, capsys):
    options = [data.get(option, option) for option in options]
    assert main([*command(tmp_path / "run", *options)[3:]]) == 2
    assert_one_sentence(capsys.readouterr().err, sentence)
    assert not (tmp_path / "run").exists()


def assert_one_sentence(message, part):
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert part in message


def test_dist_rng_that_is_not_installed_is_one_sentence_and_exit_code_2(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "dist_rng", None)  # which cannot be imported
    options = ["--random", "dist-rng", "--system", "dtensor-tp", "--ranks", "2"]
    assert main(command(tmp_path / "run", *options)[3:]) == 2
    assert capsys.readouterr().err == (
        "error: --random dist-rng needs the package dist-rng, which is not installed; install it,"
        f" or use --random {NATIVE_RANDOM}\n"
    )
    assert not (tmp_path / "run").exists()


def test_a_rank_that_cannot_be_started_is_named(tmp_path):
    broken = tmp_path / "python"
    broken.write_text(f'#!/bin/sh\n[ "$RANK" = 1 ] && exit 7\nexec {sys.executable} "$@"\n')
    broken.chmod(broken.stat().st_mode | stat.S_IEXEC)
    script = (
        "import sys; from pathlib import Path; from integration.errors import UsageError\n"
        "from integration.train.launch.local import launch\n"
        "try:\n"
        f"    launch({command(tmp_path / 'run', '--system', 'ddp', '--ranks', 'None')[3:]!r}, 2,"
        f" log_folder=Path({str(tmp_path / 'logs')!r}), python={str(broken)!r})\n"
        "except UsageError as error:\n"
        "    sys.exit(f'refused: {error}')\n"
    )
    result = run_python("-c", script, timeout=120)
    assert "refused: rank 1 of 2 could not be started (exit code 7)" in result.stderr


def test_more_threads_than_cores_is_a_warning(tmp_path):
    cores = os.cpu_count() or 1
    message = train(tmp_path, "--threads", str(cores + 1), "--steps", "1")
    assert f"1 ranks x {cores + 1} threads share {cores} cores" in message


def test_help_names_every_system(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # narrow terminals break names at hyphens
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code in (0, None)
    shown = capsys.readouterr().out
    assert [name for name in SYSTEM_NAMES if name not in shown] == []


def test_a_finished_run_leaves_its_last_step_and_a_longer_one_goes_on_from_there(tmp_path):
    toml = tmp_path / "run.toml"
    toml.write_text("warmup_steps = 2\n")
    out, options = tmp_path / "run", ["--config", str(toml), "--checkpoint-every", "2"]
    train(out, *options, "--steps", "3")
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    rates = [record.learning_rate for record in read_metrics(out)]
    assert rates == [pytest.approx(5e-4), pytest.approx(1e-3), pytest.approx(1e-3)]
    written = (out / "checkpoints" / names[-1]).stat().st_mtime_ns
    train(out, *options, "--steps", "3")
    assert (out / "checkpoints" / names[-1]).stat().st_mtime_ns == written
    message = train(out, *options, "--steps", "5", "--no-final-checkpoint")
    assert "step-00000003 at step 3" in message
    assert newest_complete(out).path.name == "step-00000004"
