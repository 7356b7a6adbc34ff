"""Checkpoints in the background, and which stay."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from integration.errors import UnwrittenError
from integration.train.checkpoint import checkpoint
from integration.train.checkpoint.checksum import file_checksum
from integration.train.checkpoint.saver import CheckpointSaver, remove_older
from integration.train.launch.world import World, process_group
from testkit import run_ranks

IDENTITY = checkpoint.Identity(
    model={"name": "linear"}, data_fingerprint="f", sequence_length=4, global_batch=2, seed=0
)


def names(run):
    return sorted(path.name for path in (run / checkpoint.FOLDER).iterdir())


def steps_kept(run):
    return [int(name.removeprefix("step-")) for name in names(run) if name[0] != "."]


@pytest.fixture
def world():
    with process_group(60) as world:
        yield world


def linear():
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def saver(run, world, *, background=True, keep_checkpoints=0):
    return CheckpointSaver(
        run, IDENTITY, world, background=background, keep_checkpoints=keep_checkpoints, timeout=60
    )


def test_a_background_save_has_the_state_of_its_step(world, tmp_path, monkeypatch):
    import threading

    go_on = threading.Event()
    write = dcp.FileSystemWriter.write_data

    def slow_write(*args):
        go_on.wait(60)
        return write(*args)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", slow_write)
    model, optimizer = linear()
    before = [p.detach().clone() for p in model.parameters()]
    generator = torch.get_rng_state()
    background = saver(tmp_path, world)
    path = background.save(1, model, optimizer, wait=False)
    optimizer.step()  # training goes on before anything is written
    torch.rand(3)
    assert checkpoint.newest_complete(tmp_path).path is None
    assert not path.exists()
    go_on.set()
    background.finish()
    assert checkpoint.newest_complete(tmp_path).path == path
    other, its_optimizer = linear()
    checkpoint.load(path, other, its_optimizer, world)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert float(its_optimizer.state[other.weight]["step"]) == 1
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_next_save_waits_for_the_previous_one_and_raises_its_error(
    world, tmp_path, monkeypatch
):
    model, optimizer = linear()
    background = saver(tmp_path, world)
    background.save(1, model, optimizer, wait=False)
    background.save(2, model, optimizer, wait=False)
    assert steps_kept(tmp_path)[0] == 1
    background.finish()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", no_space)
    background.save(3, model, optimizer, wait=False)
    newest = tmp_path / checkpoint.FOLDER / "step-00000002"
    sentence = (
        rf"checkpoint of step 3 .* \(No space left on device\); .* one is {newest}: correct that"
    )
    with pytest.raises(UnwrittenError, match=sentence):
        background.save(4, model, optimizer, wait=False)
    assert checkpoint.newest_complete(tmp_path).path == newest
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("where", ["its manifest", "torch's zip"])
def test_one_that_the_disk_does_not_take_leaves_those_before(
    where, background, world, tmp_path, monkeypatch
):
    model, optimizer = linear()
    saves = saver(tmp_path, world, background=background)
    before = saves.save(1, model, optimizer)

    def no_space(*_):
        raise OSError(28, "No space left on device")

    def covered(*_):
        try:
            no_space()
        finally:  # as torch's destructor does
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos")

    if where == "its manifest":
        monkeypatch.setattr(checkpoint, "_write_durably", no_space)
    else:
        monkeypatch.setattr(dcp.FileSystemWriter, "write_data", covered)

    def save():
        saves.save(2, model, optimizer, wait=False)
        saves.finish()

    with pytest.raises(
        UnwrittenError, match=rf"No space left on device.* one is {before}: correct that"
    ):
        save()
    assert names(tmp_path) == [before.name]
    checkpoint.read_manifest(before)


def test_errors_other_than_the_disks_are_not_unwritten_errors(world, tmp_path, monkeypatch):
    def broken(*_):
        raise KeyError("torch")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", broken)
    with pytest.raises(dcp.api.CheckpointException, match="KeyError: 'torch'"):
        saver(tmp_path, world, background=False).save(1, *linear())


@pytest.mark.ranks
@pytest.mark.parametrize("background", [False, True])
def test_every_rank_ends_where_the_disk_takes_all_but_the_manifest_of_the_first(
    background, tmp_path
):
    def save(run):
        import torch.distributed as dist

        def no_space(*_):
            raise OSError(28, "No space left on device")

        saves = saver(Path(run), World(dist.get_rank(), 2), background=background)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "_write_durably", no_space)
            try:
                saves.save(1, *linear(), wait=False)
                saves.finish()
            except UnwrittenError as error:
                return str(error)

    first, second = run_ranks(save, 2, str(tmp_path), timeout=120)
    assert first == second
    assert "step 1 could not be written" in first
    assert names(tmp_path) == []


def test_a_real_one_cut_short_anywhere_is_skipped_with_its_reason(world, tmp_path):
    """Each file at each of several lengths; and a manifest that tells another length."""
    saves = saver(tmp_path, world, background=False)
    before, path = (saves.save(step, *linear()) for step in (1, 2))
    files = sorted(path.iterdir())
    assert [file.name for file in files] == [".metadata", "__0_0.distcp", checkpoint.MANIFEST]

    def skipped():
        found = checkpoint.newest_complete(tmp_path)
        assert found.path == before
        (sentence,) = found.skipped
        return sentence

    for file in files:
        whole = file.read_bytes()
        for length in sorted({0, 1, 2, len(whole) // 2, len(whole) - 2, len(whole) - 1}):
            file.write_bytes(whole[:length])
            if file.name == checkpoint.MANIFEST:
                expected = f"{path} is not a complete checkpoint: its manifest.json cannot be read"
            else:
                expected = (
                    f"checkpoint {path} is truncated: {file.name}: expected {len(whole)} bytes, got"
                    f" {length}"
                )
            assert skipped() == expected
        file.unlink()
        assert str(path) in skipped()
        file.write_bytes(whole)
    assert checkpoint.newest_complete(tmp_path) == checkpoint.CheckpointSearch(path, ())
    manifest = path / checkpoint.MANIFEST
    size = f'"__0_0.distcp": {(path / "__0_0.distcp").stat().st_size}'
    flipped = size[:-1] + str(9 - int(size[-1]))
    manifest.write_text(manifest.read_text().replace(size, flipped))
    assert "manifest.json does not have its own checksum" in skipped()


@pytest.mark.parametrize("background", [False, True])
def test_the_newest_checkpoints_are_kept(world, tmp_path, background):
    model, optimizer = linear()
    saves = saver(tmp_path, world, background=background, keep_checkpoints=2)
    for step in (3, 6, 9):
        saves.save(step, model, optimizer, wait=False)
    saves.finish()
    assert names(tmp_path) == ["step-00000006", "step-00000009"]


@pytest.mark.ranks
def test_one_saved_in_the_background_resumes_at_other_numbers_of_ranks(train_runs, tmp_path):
    (whole,) = train_runs(2, [{"system": "fsdp"}], out=tmp_path, steps=5)
    first = {"system": "fsdp", "checkpoint_async": True, "checkpoint_every": 3}
    train_runs(2, [first], out=tmp_path / "a", steps=3)
    (path,) = (tmp_path / "a" / checkpoint.FOLDER).glob("step-*")
    options = {"system": "fsdp", "resume": str(path)}
    (same,) = train_runs(2, [options], out=tmp_path / "b", steps=5)
    assert same == whole[3:]
    for system, ranks in (("fsdp2", 4), ("single", 1)):
        (other,) = train_runs(ranks, [options | {"system": system}], out=tmp_path / system, steps=5)
        assert other == pytest.approx(whole[3:], abs=1e-5)


# From here on without DCP: what happens to folders.


def write_folder(path, step):
    """A folder with the files of a checkpoint, and a manifest unless it is a draft's."""
    path.mkdir(parents=True)
    for rank in range(2):
        (path / f"__{rank}_0.distcp").write_bytes(b"12345678")
    if not path.name.endswith(".partial"):
        files = {f"__{rank}_0.distcp": 8 for rank in range(2)}
        manifest = checkpoint.Manifest(step, 1, IDENTITY, files)
        (path / checkpoint.MANIFEST).write_text(checkpoint.manifest_text(manifest))


def sums_of(draft):
    return {path.name: file_checksum(path) for path in draft.partial.iterdir()}


def write_run(run, steps):
    for step in steps:
        write_folder(run / checkpoint.FOLDER / checkpoint.folder_name(step), step)


@pytest.mark.parametrize(
    ("steps", "completed", "keep_checkpoints", "remaining"),
    [
        ([3, 6, 9], 9, 1, [9]),
        ([3, 6, 9], 9, 2, [6, 9]),
        ([3, 6, 9], 9, 5, [3, 6, 9]),
        ([3, 6, 9], 6, 1, [6, 9]),  # resumed from 3: 9 is of the run before
    ],
)
def test_older_checkpoints_are_removed(tmp_path, steps, completed, keep_checkpoints, remaining):
    write_run(tmp_path, steps)
    remove_older(tmp_path, completed, keep_checkpoints=keep_checkpoints)
    assert steps_kept(tmp_path) == remaining


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    write_run(tmp_path, [3, 6, 9, 12])
    os.truncate(tmp_path / checkpoint.FOLDER / "step-00000009" / "__1_0.distcp", 7)
    remove_older(tmp_path, 12, keep_checkpoints=2)
    assert steps_kept(tmp_path) == [6, 9, 12]


class Killed(BaseException):
    """The end of the process, in a test."""


def kill_at(monkeypatch, number):
    """Have the process end within the so-manieth change of a folder; a removal is half done."""
    left = [number]
    rename, rmtree = os.rename, shutil.rmtree

    def ends():
        left[0] -= 1
        return left[0] == 0

    def renames(source, target):
        if ends():
            raise Killed
        rename(source, target)

    def removes(path, **options):
        if ends():
            for file in sorted(Path(path).glob("*"))[::2]:
                file.unlink()
            raise Killed
        rmtree(path, **options)

    monkeypatch.setattr(os, "rename", renames)
    monkeypatch.setattr(shutil, "rmtree", removes)


@pytest.mark.parametrize(
    ("there", "step"),
    [([3, 6], 9), ([6], 6), ([], 3), ([3, 6, 9], 6)],
    ids=["a newer one", "the only one again", "the first", "an older one again"],
)
def test_whenever_a_run_is_killed_a_complete_checkpoint_is_left(there, step, tmp_path, monkeypatch):
    kills = 0
    while True:
        kills += 1
        run = tmp_path / str(kills)
        write_run(run, there)
        draft = checkpoint.CheckpointDraft(run, step, IDENTITY, World(0, 1))
        write_folder(draft.partial, step)
        with monkeypatch.context() as patch:
            kill_at(patch, kills)
            try:
                draft.commit(sums_of(draft))
                remove_older(run, step, keep_checkpoints=1)
            except Killed:
                killed = True
            else:
                killed = False
        found = checkpoint.newest_complete(run).path
        if there:
            assert found is not None, f"killed in change {kills}"
            assert checkpoint.read_manifest(found).step >= max(s for s in (*there, 0) if s <= step)
        if not killed:
            break
        # The run that goes on writes the same again, beside what is left.
        shutil.rmtree(draft.partial, ignore_errors=True)
        write_folder(draft.partial, step)
        draft.commit(sums_of(draft))
        remove_older(run, step, keep_checkpoints=1)
        assert steps_kept(run) == sorted({step, *(s for s in there if s > step)})
    assert kills > 1
