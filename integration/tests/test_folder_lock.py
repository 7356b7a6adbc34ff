"""Two jobs never write one run folder."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from integration.errors import UsageError
from integration.train.checkpoint.folder_lock import LOCK_FILE, LockOwner, folder_lock
from integration.train.config import TrainConfig
from integration.train.launch.world import World, process_group
from integration.train.setup import locked_setup
from testkit import run_ranks

# A job that holds the folder until somebody ends it.
HOLDER = """
import sys, time
from pathlib import Path
from integration.train.checkpoint.folder_lock import folder_lock
from integration.train.launch.world import process_group
with process_group(60) as world, folder_lock(Path(sys.argv[1]), world):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module", autouse=True)
def world():
    with process_group(60) as world:
        yield world


@pytest.fixture
def holder(tmp_path):
    """Another job, which holds ``tmp_path``."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def write_owner(out, **changes):
    (out / LOCK_FILE).write_text(json.dumps(asdict(replace(LockOwner.this_process(), **changes))))


def test_a_second_job_is_refused_while_the_first_lives_and_not_after_however_it_ended(
    holder, world, tmp_path
):
    owner = json.loads((tmp_path / LOCK_FILE).read_text())
    refused = (
        f"another job writes {tmp_path} \\(process {holder.pid} on {owner['host']}, since"
        f" {owner['since']}\\); wait until it ends, or give another --out"
    )
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(UsageError, match=refused), folder_lock(tmp_path, world):
            pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with folder_lock(tmp_path, world):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert (tmp_path / LOCK_FILE).read_text() == ""
    with folder_lock(tmp_path, world):
        pass


def test_a_mistake_is_found_before_the_folder_is_made(world, tmp_path):
    out = tmp_path / "run"
    config = TrainConfig(model="nope", out=out)
    with pytest.raises(UsageError, match="unknown model"), locked_setup(config, world):
        pass
    assert not out.exists()


def test_the_checkpoint_to_resume_is_searched_after_other_jobs_have_ended(
    world, tmp_path, monkeypatch
):
    """The first job ends between the two looks of the second."""
    from integration.train import setup

    seen = []

    def look(config, ranks, verification=None):
        path = config.out / LOCK_FILE
        seen.append(path.exists() and json.loads(path.read_text())["pid"])
        return len(seen)

    monkeypatch.setattr(setup, "prepare", look)
    with locked_setup(TrainConfig(out=tmp_path), world) as given:
        assert given == 2
    assert seen == [False, os.getpid()]


def test_a_lock_of_another_host_is_respected_and_the_error_names_the_file_to_remove(
    world, tmp_path
):
    write_owner(tmp_path, host="elsewhere", pid=7)
    with pytest.raises(UsageError) as refused, folder_lock(tmp_path, world):
        pass
    sentence = str(refused.value)
    assert f"another job may write {tmp_path} (process 7 on elsewhere, since " in sentence
    assert sentence.endswith(f"if that job has ended, remove {tmp_path / LOCK_FILE}")
    (tmp_path / LOCK_FILE).unlink()
    with folder_lock(tmp_path, world):
        pass


@pytest.mark.parametrize(
    ("before", "now", "taken"),
    [("7", "7", True), ("7", "8", False), ("", "", False), ("none", "none", False)],
    ids=["the same", "another", "neither has one", "torchrun's default"],
)
def test_a_job_of_torchrun_goes_on_on_another_host(
    before, now, taken, world, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", before)
    write_owner(tmp_path, host="elsewhere")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", now)
    if taken:
        with folder_lock(tmp_path, world):
            pass
    else:
        with pytest.raises(UsageError, match="elsewhere"), folder_lock(tmp_path, world):
            pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": "a"}'])
def test_a_lock_file_without_an_owner_is_free(text, world, tmp_path):
    (tmp_path / LOCK_FILE).write_text(text)
    with folder_lock(tmp_path, world):
        pass


def test_a_file_system_without_locks_is_refused(world, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    sentence = r"cannot be locked \(Function not implemented\)"
    with pytest.raises(UsageError, match=sentence), folder_lock(tmp_path, world):
        pass


@pytest.mark.ranks
def test_every_rank_is_refused(holder, tmp_path):
    def enter(out):
        from pathlib import Path

        import torch.distributed as dist

        try:
            with folder_lock(Path(out), World(dist.get_rank(), 2)):
                return None
        except UsageError as error:
            return str(error)

    first, second = run_ranks(enter, 2, str(tmp_path), timeout=120)
    assert first == second
    assert first.startswith("another job writes")
