"""A changed bit in any byte of any file of a checkpoint is found, and the file named."""

import json

import pytest
import torch
from torch import nn

from integration.errors import UsageError
from integration.train.checkpoint import checkpoint
from integration.train.checkpoint.checksum import ChecksumFileSystem, checksum, file_checksum
from integration.train.checkpoint.saver import CheckpointSaver
from integration.train.launch.world import process_group
from testkit import run_ranks

IDENTITY = checkpoint.Identity(
    model={"name": "linear"}, data_fingerprint="f", sequence_length=4, global_batch=2, seed=0
)


def save(run, world, *, step=1, background=False):
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saver = CheckpointSaver(
        run, IDENTITY, world, background=background, keep_checkpoints=0, timeout=60
    )
    path = saver.save(step, model, optimizer, wait=not background)
    saver.finish()
    return path, model, optimizer


@pytest.fixture
def world():
    with process_group(60) as world:
        yield world


def flip(file, offset, bit):
    content = bytearray(file.read_bytes())
    content[offset] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.parametrize("background", [False, True])
def test_checksums_recorded_while_writing_are_those_of_the_files(background, world, tmp_path):
    path, _, _ = save(tmp_path, world, background=background)
    manifest = checkpoint.read_manifest(path, checkpoint.verify)
    files = sorted(each.name for each in path.iterdir() if each.name != checkpoint.MANIFEST)
    assert ".metadata" in files
    assert sorted(manifest.checksums) == sorted(manifest.files) == files
    for name in files:
        assert manifest.checksums[name] == checksum((path / name).read_bytes())


def test_a_save_leaves_torchs_own_checksums_as_the_user_set_them(world, tmp_path):
    for set_by_user in (False, True):
        torch.serialization.set_crc32_options(set_by_user)
        save(tmp_path, world)
        assert torch.serialization.get_crc32_options() is set_by_user


def test_checksums_are_of_the_whole_file_however_it_is_written(tmp_path):
    files = ChecksumFileSystem()
    with files.create_stream(tmp_path / "a", "wb") as stream:
        stream.write(b"one")
        assert stream.tell() == 3
        stream.write(memoryview(b"two"))
    assert files.checksums == {"a": checksum(b"onetwo")}
    assert file_checksum(tmp_path / "a") == checksum(b"onetwo")
    with files.create_stream(tmp_path / "a", "rb") as stream:
        assert stream.read() == b"onetwo"
    assert list(files.checksums) == ["a"]


def test_a_flipped_bit_in_any_byte_changes_the_checksum_of_a_file(world, tmp_path):
    path, _, _ = save(tmp_path, world)
    for name, recorded in checkpoint.read_manifest(path).checksums.items():
        content = bytearray((path / name).read_bytes())
        for offset in range(len(content)):
            content[offset] ^= 1 << offset % 8
            assert checksum(bytes(content)) != recorded, (name, offset)
            content[offset] ^= 1 << offset % 8


def refusal(path):
    with pytest.raises(UsageError) as refusal:
        checkpoint.read_manifest(path, checkpoint.verify)
    return str(refusal.value)


def test_a_file_with_a_flipped_bit_is_named(world, tmp_path):
    path, model, optimizer = save(tmp_path, world)
    for name in checkpoint.read_manifest(path).checksums:
        whole = (path / name).read_bytes()
        for offset in (0, len(whole) // 2, len(whole) - 1):
            flip(path / name, offset, offset % 8)
            assert f"damaged: {name}: expected checksum" in refusal(path), offset
            (path / name).write_bytes(whole)
    checkpoint.load(path, model, optimizer, world)


@pytest.mark.slow
def test_any_flipped_bit_of_a_manifest_is_found_though_it_is_parsed(world, tmp_path):
    path, _, _ = save(tmp_path, world)
    file = path / checkpoint.MANIFEST
    whole = file.read_bytes()
    for offset in range(len(whole)):
        for bit in range(8):
            flip(file, offset, bit)
            assert file.name in refusal(path), (offset, bit)
            file.write_bytes(whole)


def test_a_damaged_checkpoint_is_not_loaded(world, tmp_path):
    path, model, optimizer = save(tmp_path, world)
    shard = next(path.glob("*.distcp"))
    flip(shard, shard.stat().st_size // 2, 3)
    for load in (
        lambda: checkpoint.load(path, model, optimizer, world),
        lambda: checkpoint.load_weights(path, dict(model.state_dict())),
    ):
        with pytest.raises(UsageError, match=rf"damaged: {shard.name}: expected checksum .*, got"):
            load()


def test_a_manifest_with_a_key_too_many_or_too_few_is_no_older_one(world, tmp_path):
    path, _, _ = save(tmp_path, world)
    whole = json.loads((path / checkpoint.MANIFEST).read_text())
    for key in ("checksum", "checksums"):
        broken = {name: value for name, value in whole.items() if name != key}
        (path / checkpoint.MANIFEST).write_text(json.dumps(broken, indent=2))
        with pytest.raises(UsageError, match=r"manifest\.json does not have its own checksum"):
            checkpoint.read_manifest(path)


@pytest.mark.ranks
def test_ranks_divide_the_files_and_all_hear_of_a_damaged_one(tmp_path):
    def body(folder):
        from pathlib import Path

        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        from integration.train.checkpoint import checkpoint
        from integration.train.checkpoint.checkpoint import newest_complete, verify_together
        from integration.train.checkpoint.saver import CheckpointSaver
        from integration.train.launch.world import World

        world = World(dist.get_rank(), dist.get_world_size())
        model = torch.nn.Linear(4, 4)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        identity = checkpoint.Identity({"name": "linear"}, "f", 4, 2, 0)
        saver = CheckpointSaver(
            Path(folder), identity, world, background=False, keep_checkpoints=0, timeout=60
        )
        older, newer = (saver.save(step, model, optimizer) for step in (1, 2))
        manifest = checkpoint.read_manifest(newer, verify_together(world))
        found = []
        for name in manifest.checksums:
            whole = (newer / name).read_bytes()
            dist.barrier()
            if world.is_main:
                (newer / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
            dist.barrier()
            search = newest_complete(Path(folder), verify_together(world))
            assert search.path == older
            found.append((name, search.skipped))
            dist.barrier()
            if world.is_main:
                (newer / name).write_bytes(whole)
        return found

    first, second = run_ranks(body, 2, str(tmp_path))
    assert first == second
    assert sum(name.endswith(".distcp") for name, _ in first) == 2
    for name, (sentence,) in first:
        assert f"step-00000002 is damaged: {name}: expected checksum " in sentence
