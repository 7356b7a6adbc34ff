"""What prepare() refuses, before anything is written."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from integration.errors import UsageError
from integration.train.checkpoint import checkpoint
from integration.train.config import TrainConfig
from integration.train.metrics import METRICS_FILE, SUMMARY_FILE
from integration.train.setup import prepare
from testkit import run_ranks

IDENTITY = checkpoint.Identity(
    model={"name": "llama-tiny", "hidden_size": 64},
    data_fingerprint="f",
    sequence_length=64,
    global_batch=8,
    seed=0,
)


def write_checkpoint(run, step, *, payload=b"12345678"):
    folder = run / checkpoint.FOLDER / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(payload)
    manifest = checkpoint.Manifest(step, 1, IDENTITY, {"__0_0.distcp": 8})
    (folder / checkpoint.MANIFEST).write_text(checkpoint.manifest_text(manifest))
    return folder


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"system": "nope"}, 1, "unknown system 'nope'; choose one of: single, ddp"),
        ({"model": "nope"}, 1, "unknown model 'nope'; choose one of: llama-10m"),
        ({"system": "single"}, 2, "expected 1 rank, got 2"),
        ({"system": "ddp"}, 3, "global batch 8 is not micro batch 4 x"),
        ({"system": "dtensor-tp"}, 3, "3 ranks do not divide num_attention_heads"),
        (
            {"system": "fsdp1", "optimizer": "muon"},
            2,
            "'fsdp1': expected --optimizer adamw, got muon",
        ),
        (
            {"system": "ddp", "tp": 2},
            2,
            "'ddp' does not take --tp 2; leave it out, or use one of: torchtitan-style, plan",
        ),
        (
            {"system": "plan", "tp": 2},
            4,
            r"number of ranks, 4, got 2 \(tp 2\); give --dp-shard 2, or -1, which takes the rest",
        ),
        (
            {"system": "plan", "dp_replicate": 2, "tp": 3},
            8,
            r"got 6 \(dp_replicate 2 x tp 3\); give others, whose product is 1, 2, 4 or 8",
        ),
        (
            {"system": "plan", "tp": 8},
            8,
            "--tp 8: expected a divisor of num_key_value_heads = 4, got 8; --tp 1, 2 or 4 would",
        ),
        (
            {"system": "plan", "dp_shard": 2, "tp": 3},
            6,
            "--tp 3: expected a divisor of num_attention_heads = 8, got 3; --tp 1 or 2 would fit",
        ),
        (
            {"system": "plan", "dp_shard": 2, "tp": 3, "zero3": True, "static": True},
            6,
            "--tp 3: expected a divisor of num_attention_heads = 8, got 3; --tp 1 or 2 would fit",
        ),
        (
            {"system": "plan", "dp_shard": -1, "tp": 3},
            4,
            r"--dp-shard -1: expected other .* the 4 ranks, got 3 \(tp 3\); .* is 1, 2 or 4",
        ),
        ({"system": "plan", "dp_shard": -1, "pp_degree": 4}, 6, "--pp-degree: expected a divisor"),
        ({"system": "ddp", "dp_shard": -1}, 1, "'ddp' does not take --dp-shard -1; leave it out"),
        (
            {"system": "plan", "model": "deepseek-v3-tiny", "tp": 3, "static": True},
            3,
            "--tp 3: expected a divisor of num_attention_heads = 4",
        ),
        ({"system": "plan", "sp": True}, 1, "--sp: expected --tp of at least 2, got 1"),
        (
            {"system": "plan", "loss_parallel": True},
            1,
            "--loss-parallel: expected --tp of at least 2",
        ),
        (
            {"system": "plan", "ep": 2, "dp_shard": 2},
            2,
            "--ep: expected a model with experts, got a llama",
        ),
        (
            {"system": "plan", "model": "mixtral-tiny", "ep": 3, "dp_shard": 6},
            6,
            "--ep 3: expected a divisor of num_local_experts = 4, got 3; --ep 1 or 2 would fit",
        ),
        (
            {"system": "plan", "model": "mixtral-tiny", "ep": 4, "tp": 2},
            2,
            "--ep 4: expected a divisor of --dp-replicate 1, or the value of --tp, 2, got 4; --ep 1"
            " or 2 would fit",
        ),
        (
            {"system": "plan", "model": "mixtral-tiny", "ep": 4, "dp_shard": 2, "dp_replicate": 2},
            4,
            "--ep 4: expected a divisor of --dp-shard 2, got 4; --ep 1 or 2 would fit",
        ),
        (
            {"system": "plan", "cp": 4, "sequence_length": 20},
            4,
            "--cp 4: .* multiple of 8, .* two chunks .*, got 20; --cp 1 or 2 would fit, or"
            " --sequence-length 16 or 24",
        ),
        (
            {"system": "plan", "cp": 2, "cp_method": "ulysses", "sequence_length": 33},
            2,
            "--cp 2: .* multiple of 2, .* equal part .*, got 33; --cp 1 would fit",
        ),
        (
            {"system": "plan", "dp_shard": 2, "tp": 4, "dropout": 0.1, "micro_batch": 1},
            8,
            "--dropout 0.1: expected --tp 4 to divide the 2 samples .*; --tp 1 or 2 would fit",
        ),
        (
            {"system": "plan", "cp": 4, "tp": 2, "cp_method": "ulysses"},
            8,
            "ulysses: expected --cp 4 x --tp 2 to divide num_key_value_heads = 4, got 8; .* is 1, 2"
            " or 4, or",
        ),
        (
            {"system": "plan", "cp": 2, "tp": 2, "sp": True, "model": "dit-tiny"},
            4,
            "--cp 2: expected no --sp for a dit, .* got --sp; leave either out",
        ),
        (
            {"system": "plan", "cp": 3, "model": "dit-tiny"},
            3,
            "--cp 3: expected a divisor of patches = 16, got 3; --cp 1 would fit",
        ),
        (
            {"system": "plan", "cp": 6, "cp_method": "ulysses-ring:4"},
            6,
            "--cp-method ulysses-ring:4: expected a divisor of --cp 6 between 1 and 6, .*, got 4;"
            " give ulysses-ring:N with N = 2 or 3",
        ),
        (
            {"system": "plan", "cp": 2, "cp_method": "ulysses-ring:2"},
            2,
            "--cp-method ulysses-ring:2: expected .* got 2; use --cp-method ulysses, or another",
        ),
        (
            {"system": "plan", "cp": 8, "tp": 2, "cp_method": "ulysses-ring:4"},
            16,
            "--cp-method ulysses-ring:4: expected 4 x --tp 2 to divide num_key_value_heads = 4,"
            " got 8; give degrees whose product is 1, 2 or 4, or --cp-method ring",
        ),
        (
            {"system": "plan", "cp": 8, "model": "dit-tiny", "cp_method": "ulysses"},
            8,
            "ulysses: expected --cp 8 x --tp 1 to divide num_heads = 4, got 8; .* is 1, 2 or 4, or",
        ),
        (
            {"system": "plan", "model": "mixtral-tiny", "ep": 2, "cp": 4},
            4,
            "--ep 2: expected a divisor of --dp-replicate 1, or --cp 4 times one, got 2; --ep 1 or"
            " 4 would fit",
        ),
        ({"system": "plan", "zero3": True}, 1, "--zero3: expected --dp-shard of at least 2"),
        (
            {"system": "plan", "model": "mixtral-tiny", "ep_chunks": 2, "dp_shard": 2},
            2,
            "--ep-chunks 2: expected --ep of at least 2 along --dp-shard, .* got --ep 1; give one",
        ),
        (
            {"system": "plan", "model": "mixtral-tiny", "ep_chunks": 2, "tp": 2, "ep": 2},
            2,
            "--ep-chunks 2: expected .* --tp with --sp, .* got --ep 2 along --tp 2; give one",
        ),
        ({"system": "fsdp", "ep_chunks": 2}, 2, "'fsdp' does not take --ep-chunks 2; leave it out"),
        (
            {"system": "torchtitan-style", "dp_shard": 2, "ep_chunks": 2},
            2,
            "--ep-chunks 2",
        ),
        (
            {"system": "plan", "zero3": True, "dp_shard": 2, "dp_replicate": 2},
            4,
            "--dp-shard 2 and --dp-replicate 2",
        ),
        (
            {"system": "plan", "zero3": True, "dp_shard": 2, "ep": 2, "model": "mixtral-tiny"},
            2,
            "--zero3: expected --ep 1",
        ),
        (
            {"system": "ddp", "placements": "zero1"},
            2,
            "'ddp' does not take --placements zero1; leave it out, or use one of: fsdp, plan$",
        ),
        (
            {"system": "torchtitan-style", "placements": "zero1", "dp_shard": 2},
            2,
            "'torchtitan-style' does not take --placements zero1",
        ),
        ({"system": "fsdp", "placements": "zero1", "tp": 2}, 2, "'fsdp' does not take --tp 2;"),
        (
            {"system": "fsdp", "placements": "hfsdp"},
            2,
            "one of ddp, zero1, zero2, zero3 on one data parallel axis, got hfsdp; .* or --system",
        ),
        (
            {"system": "plan", "placements": "zero2", "dp_shard": 2, "dp_replicate": 2},
            4,
            "expected one of hsdp, hfsdp on --dp-replicate with --dp-shard, got zero2",
        ),
        (
            {"system": "plan", "placements": "zero2", "dp_replicate": 2},
            2,
            "--placements zero2: expected --dp-shard of at least 2 .*, got --dp-replicate 2",
        ),
        (
            {"system": "plan", "placements": "zero2", "dp_shard": 2, "zero3": True},
            2,
            "expected --dp-shard of at least 2 without --zero3",
        ),
        (
            {"system": "plan", "placements": "hfsdp", "dp_shard": 2, "dp_replicate": 2, "tp": 2},
            8,
            "--placements hfsdp: expected neither --tp, --cp nor --ep, .* got --tp 2; use",
        ),
        (
            {"system": "plan", "dp_shard": 3},
            3,
            "global batch 8 is not micro batch 4 x accumulation x data-parallel degree 3",
        ),
        (
            {"system": "dtensor-tp", "model": "dit-tiny"},
            3,
            "3 ranks do not divide hidden_size = 32",
        ),
        (
            {"system": "fsdp2", "model": "dit-tiny", "init": "sharded"},
            2,
            "initialiser cannot draw on shards",
        ),
        (
            {"system": "fsdp", "init": "sharded"},
            2,
            "expected --random dist-rng, as torch draws other",
        ),
        (
            {"system": "dtensor-tp", "compile": "aot_eager"},
            2,
            "'dtensor-tp' does not support --compile aot_eager; use --compile none, or one of the",
        ),
        (
            {"system": "dtensor-tp", "dtype": "bf16"},
            2,
            "'dtensor-tp' does not support --dtype bf16; use --dtype fp32, or one of the systems",
        ),
        (
            {"system": "fsdp1", "dtype": "fp16"},
            2,
            "'fsdp1' does not support --dtype fp16; .* systems single, ddp, fsdp2, fsdp, plan",
        ),
        ({"profile_steps": "3-4"}, 1, "--profile-steps: expected a range such as 10:13, got 3-4"),
        ({"data": Path("/no/such")}, 1, "data path /no/such does not exist"),
        ({"data": Path("/dev/null")}, 1, "data path /dev/null is neither a file nor a folder"),
        ({"resume": "/no/such"}, 1, "/no/such is not a complete checkpoint"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused(tmp_path, options, ranks, message):
    config = TrainConfig(out=tmp_path / "run", **options)
    with pytest.raises(UsageError, match=message):
        prepare(config, ranks)
    assert not (tmp_path / "run").exists()


def test_a_setup_has_the_rest_of_the_ranks_as_a_number(tmp_path):
    config = TrainConfig(system="plan", model="llama-tiny", dp_shard=-1, out=tmp_path / "run")
    assert prepare(config, 2).config == replace(config, dp_shard=2)


def test_inductor_without_a_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"needs the compiler g\+\+.* or use --compile aot_eager"):
        prepare(TrainConfig(out=tmp_path / "run", compile="inductor"), 1)


@pytest.mark.parametrize("out", ["run", "run/below/it"])
def test_the_run_folder_must_not_be_a_file_nor_lie_below_one(tmp_path, out):
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="run is a file, not a folder; give another --out"):
        prepare(TrainConfig(out=tmp_path / out), 1)


def test_a_run_folder_with_an_impossible_name_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"cannot write .*File name too long.*give another --out"):
        prepare(TrainConfig(out=tmp_path / ("x" * 300)), 1)


@pytest.mark.parametrize("out", ["text", "text/runs/a"])
def test_a_run_folder_inside_the_data_is_refused(tmp_path, out):
    # Its files would be training data from the next start on, and a resume another run's.
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("text" * 200)
    with pytest.raises(UsageError, match=r"--out .* is inside --data .*; give another --out"):
        prepare(TrainConfig(out=tmp_path / out, data=tmp_path / "text"), 1)
    assert prepare(TrainConfig(out=tmp_path / "text2", data=tmp_path / "text"), 1).notices == ()


def test_never_resuming_refuses_a_folder_that_holds_a_run(tmp_path):
    (tmp_path / METRICS_FILE).write_text("")
    with pytest.raises(UsageError, match="already contains a run"):
        prepare(TrainConfig(out=tmp_path, resume="never"), 1)


def test_a_finished_run_without_checkpoints_is_kept(tmp_path):
    (tmp_path / METRICS_FILE).write_text("")
    assert prepare(TrainConfig(out=tmp_path), 1).resume_from is None
    (tmp_path / SUMMARY_FILE).write_text("{}")
    with pytest.raises(UsageError, match="contains a finished run without a checkpoint"):
        prepare(TrainConfig(out=tmp_path), 1)


def test_automatic_resume_takes_the_newest_complete_checkpoint_and_says_what_it_skipped(
    tmp_path,
):
    write_checkpoint(tmp_path, 9, payload=b"1234567")
    expected = write_checkpoint(tmp_path, 6)
    write_checkpoint(tmp_path, 3)
    setup = prepare(TrainConfig(out=tmp_path), 1)
    assert setup.resume_from == expected
    notice, _ = setup.notices
    assert notice.endswith("step-00000009 is truncated: __0_0.distcp: expected 8 bytes, got 7")


def test_a_checkpoint_from_before_checksums_is_resumed_and_said_to_be_unverified(tmp_path):
    path = write_checkpoint(tmp_path, 6)
    old = asdict(checkpoint.read_manifest(path))
    del old["checksums"]
    (path / checkpoint.MANIFEST).write_text(json.dumps(old, indent=2))
    for resume in ("auto", str(path)):
        setup = prepare(TrainConfig(out=tmp_path, resume=resume), 1, checkpoint.verify)
        assert setup.resume_from == path
        (notice,) = setup.notices
        assert notice == f"{path} has no checksums; its contents are not verified"


def test_automatic_resume_does_not_start_over_where_every_checkpoint_is_damaged(tmp_path):
    for step in (3, 6):
        write_checkpoint(tmp_path, step, payload=b"1234567")
    with pytest.raises(
        UsageError, match=r"no complete checkpoint to resume \(.*step-00000006 is truncated.* start"
    ):
        prepare(TrainConfig(out=tmp_path), 1)


@pytest.mark.parametrize("cut", range(8))
def test_a_truncated_checkpoint_asked_for_by_name_is_refused(tmp_path, cut):
    path = write_checkpoint(tmp_path, 9, payload=b"12345678"[:cut])
    with pytest.raises(
        UsageError, match=f"is truncated: __0_0.distcp: expected 8 bytes, got {cut}"
    ):
        prepare(TrainConfig(out=tmp_path, resume=str(path)), 1)


def test_a_checkpoint_without_a_whole_manifest_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, 9)
    text = (path / checkpoint.MANIFEST).read_text()
    for broken in ("", text[: len(text) // 2], "[]", "{}"):
        (path / checkpoint.MANIFEST).write_text(broken)
        with pytest.raises(UsageError, match="is not a complete checkpoint"):
            prepare(TrainConfig(out=tmp_path, resume=str(path)), 1)
        assert checkpoint.newest_complete(tmp_path).path is None


def test_a_named_checkpoint_of_another_folder_does_not_overwrite_a_run(tmp_path):
    path = write_checkpoint(tmp_path / "a", 9)
    (tmp_path / "b").mkdir()
    named = TrainConfig(out=tmp_path / "b", resume=str(path))
    assert prepare(named, 1).resume_from == path
    (tmp_path / "b" / METRICS_FILE).write_text("")
    with pytest.raises(UsageError, match="already contains another run"):
        prepare(named, 1)


def test_a_checkpoint_of_another_model_is_named_by_what_differs(tmp_path):
    path = write_checkpoint(tmp_path, 9)
    manifest = checkpoint.read_manifest(path)
    checkpoint.require_same(manifest, IDENTITY, path)
    other = replace(IDENTITY, model={"name": "llama-tiny", "hidden_size": 96})
    with pytest.raises(UsageError, match=r"model\.hidden_size: expected 96, .* got 64"):
        checkpoint.require_same(manifest, other, path)


@pytest.mark.ranks
def test_a_rank_that_is_late_still_finds_the_folder_free(tmp_path):
    """Making this pipeline sends nothing, so ranks meet first where they begin to write."""

    def body(out):
        import time

        import torch.distributed as dist

        from integration.train.launch.world import World
        from integration.train.loop import Trainer
        from integration.train.stop import StopRequest

        rank = dist.get_rank()
        config = TrainConfig(
            model="llama-tiny", pp_degree=2, steps=1, out=Path(out), resume="never",
            tensorboard=False,
        )  # fmt: skip
        time.sleep(3 * rank)
        return Trainer(prepare(config, 2), World(rank, 2)).run(StopRequest())

    assert run_ranks(body, 2, str(tmp_path / "run"), timeout=60) == [True, True]
