"""Training on a small disk: what it says when that is full, and what is left."""

import subprocess

import pytest

from integration.train.checkpoint.checkpoint import newest_complete, read_manifest
from integration.train.metrics import read_metrics
from testkit import run_python

pytestmark = pytest.mark.ranks


@pytest.fixture
def disk(tmp_path):
    """Mounts a small file system in memory."""
    path = tmp_path / "disk"
    path.mkdir()

    def mount(size, *options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs"]
        try:
            result = subprocess.run([*command, str(path)], capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no program mount here")
        if result.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {result.stderr.strip()}")
        return path

    yield mount
    subprocess.run(["umount", str(path)], capture_output=True)


def train(out, *options):
    arguments = ["--model", "llama-tiny", "--out", str(out), *options]
    return run_python("-m", "integration.train", *arguments, timeout=180)


def message(result):
    """The lines that are not of the progress."""
    lines = result.stderr.splitlines()
    return [line for line in lines if not line.startswith(("step ", "resumed from "))]


@pytest.mark.parametrize("ranks", [pytest.param("2", marks=pytest.mark.slow), "1"])
def test_a_checkpoint_that_does_not_fit_is_one_sentence_and_the_one_before_is_whole(disk, ranks):
    out = disk("3m") / "run"  # a checkpoint takes 1.9 MB
    options = ["--checkpoint-every", "2", "--steps", "6", "--no-tensorboard", "--ranks", ranks]
    options += ["--checkpoint-async"] if ranks == "1" else ["--system", "ddp"]
    result = train(out, *options)
    assert result.returncode == 2, result.stderr
    first = out / "checkpoints" / "step-00000002"
    assert message(result) == [
        f"error: the checkpoint of step 4 could not be written to {out / 'checkpoints'} (No space"
        f" left on device); the newest complete one is {first}: correct that and run the same"
        " command again to resume"
    ]
    assert newest_complete(out).path == first
    assert read_manifest(first).step == 2
    assert sorted(path.name for path in first.parent.iterdir()) == [first.name]
    subprocess.run(["mount", "-o", "remount,size=16m", str(out.parent)], check=True)
    again = train(out, *options)
    assert again.returncode == 0, again.stderr
    assert f"resumed from {first} at step 2\n" in again.stderr
    assert [record.step for record in read_metrics(out)] == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_does_not_take_the_metrics_is_one_sentence(disk):
    path = disk("16k")
    (path / "other").write_bytes(b"." * 4096 * 3)
    result = train(path / "run", "--steps", "400", "--no-tensorboard")
    assert result.returncode == 2, result.stderr
    (sentence,) = message(result)
    assert sentence.startswith(f"error: {path / 'run'}")
    assert "(No space left on device)" in sentence
