"""Several runs in the same processes: each is what it would be alone."""

import json
from pathlib import Path

import pytest

from integration.compare.run import TrainingJob
from integration.compare.runner import run_jobs
from integration.errors import UsageError
from integration.train.config import TrainConfig
from integration.train.metrics import read_metrics, read_summary
from integration.train.session import MODULE, main, read_session, write_session
from testkit import run_python

SMALL = ["--model", "llama-tiny", "--steps", "3", "--no-tensorboard", "--resume", "never"]


def arguments(out, *options):
    return ["--out", str(out), *SMALL, *options]


def test_a_session_is_read_back(tmp_path):
    path = tmp_path / "session.json"
    write_session(path, [arguments(tmp_path / "a", "--ranks", "2", "--system", "ddp")])
    (config,) = read_session(path)
    assert (config.system, config.ranks, config.out) == ("ddp", 2, tmp_path / "a")


def test_a_session_on_different_numbers_of_ranks_is_refused(tmp_path):
    path = tmp_path / "session.json"
    write_session(path, [arguments(tmp_path, "--ranks", ranks) for ranks in ("1", "2")])
    with pytest.raises(
        UsageError, match=r"expected one number of ranks for all runs, got \[1, 2\]"
    ):
        read_session(path)
    with pytest.raises(UsageError, match=r"cannot read the session .*nowhere"):
        read_session(tmp_path / "nowhere")


@pytest.mark.ranks
@pytest.mark.slow  # seven runs
def test_runs_of_a_session_equal_separate_runs(start_on_ranks, tmp_path):
    native = ["--system", "fsdp2", "--ranks", "2", "--init", "sharded", "--micro-batch", "2"]
    plan = ["--system", "plan", "--tp", "2", "--ranks", "2", "--init", "sharded"]
    # Its stage has the model, which has placements that can only be taken back with it.
    pipeline = ["--system", "fsdp", "--pp-degree", "2", "--ranks", "2", "--micro-batch", "2"]
    runs = [
        arguments(tmp_path / "first", *native),
        arguments(tmp_path / "pipeline", *pipeline),
        arguments(tmp_path / "plan", *plan),
        arguments(tmp_path / "again", *native),
    ]
    write_session(tmp_path / "session.json", runs)
    for process in start_on_ranks(2, "-m", MODULE, str(tmp_path / "session.json")):
        ended = process.wait(timeout=300)
        assert ended.returncode == 0, ended.stderr
    first, plan_losses, again = (
        [record.loss for record in read_metrics(tmp_path / name)]
        for name in ("first", "plan", "again")
    )
    assert first == again != plan_losses
    assert read_summary(tmp_path / "plan").world_size == 2


SCRIPT = Path(__file__).with_name("torch_after_a_run.py")


def test_a_native_run_after_one_with_packages_has_torchs_own_functions(tmp_path):
    command = [str(SCRIPT), "mixtral-tiny", str(tmp_path), "plan", "fsdp"]
    done = run_python(*command, timeout=300)
    assert done.returncode == 0, done.stderr
    for system in ("plan", "fsdp"):
        between, after = json.loads((tmp_path / f"{system}.json").read_text())
        assert between > 0, f"{system} has changed nothing: the test is empty"
        assert after == [], system


def test_a_run_that_makes_no_sense_is_one_sentence(tmp_path, capsys):
    path = tmp_path / "session.json"
    path.write_text(json.dumps([arguments(tmp_path / "a", "--system", "nope")]))
    assert main([str(path)]) == 2
    assert "error: unknown system 'nope'" in capsys.readouterr().err


class Watcher:
    """Records which jobs have ended."""

    def __init__(self):
        self.ended_jobs = []

    def started(self, job):
        pass

    def progressed(self, job, record):
        pass

    def ended(self, outcome):
        self.ended_jobs.append(outcome.job.name)


class Stop:
    requested = False


@pytest.mark.slow  # test_compare_runs.py has a run that fails and those behind it without torch
def test_a_run_that_fails_is_the_one_that_did_and_those_behind_it_run_all_the_same(tmp_path):
    names = ["before", "apart", "broken", "behind", "last"]
    jobs = [
        TrainingJob(
            name,
            TrainConfig(
                model="llama-tiny",
                ranks=1,
                steps=3,
                out=tmp_path / name,
                tensorboard=False,
                resume="never",
                init_from=tmp_path / "nowhere" if name == "broken" else None,
            ),
            session=None if name == "apart" else "1",
        )
        for name in names
    ]
    watcher = Watcher()
    outcomes = run_jobs(jobs, watcher, Stop())
    assert [each.job.name for each in outcomes] == names
    assert watcher.ended_jobs == ["before", "broken", "apart", "behind", "last"]
    assert [each.exit_code for each in outcomes] == [0, 0, 2, 0, 0]
    # One process for the session up to what failed, one for its others.
    logs = ("before", "apart", "before", "behind", "behind")
    assert [each.log for each in outcomes] == [tmp_path / f"{name}.log" for name in logs]
    assert "nowhere" in (tmp_path / "before.log").read_text()
    for name in ("before", "apart", "behind", "last"):
        assert len(read_metrics(tmp_path / name)) == 3
