"""Options that do not go together or have no effect are refused before a process starts."""

import importlib.util
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from integration.device import CPU
from integration.errors import UsageError
from integration.train.__main__ import main
from integration.train.config import TrainConfig
from integration.train.session import read_session, write_session
from integration.train.validation import RULES, validate
from testkit import run_python

TEXT = {"model": "llama-tiny"}
DIT = {"model": "dit-tiny"}
PIPELINE = {"pp_degree": 2, "ranks": 2}

# An option without an effect, and what gives it one: the first is refused with both options' names
# in the sentence, the second is accepted.
PAIRS = {
    "cp_method": ({"system": "plan", "cp_method": "ulysses"}, {"cp": 2, "ranks": 2}, "--cp"),
    "pp_split_points": ({"pp_split_points": "model.layers.1"}, PIPELINE, "--pp-degree"),
    "pp_schedule": ({"pp_schedule": "GPipe"}, PIPELINE, "--pp-degree"),
    "pp_microbatches": ({"pp_microbatches": 4}, PIPELINE, "--pp-degree"),
    "data": (DIT | {"data": Path("text")}, TEXT, "--model dit-tiny"),
    "sequence_length": (DIT | {"sequence_length": 32}, TEXT, "--model dit-tiny"),
    "tokenizer": (DIT | {"tokenizer": "bpe:300"}, TEXT, "--model dit-tiny"),
    "attn_mask_type": (
        DIT | {"attn_mask_type": "block-causal"},
        TEXT,
        "--model dit-tiny",
    ),
    "plan": ({"plan": "json:loads"}, {"system": "plan"}, "--system single"),
    "decay_steps": (
        {"decay_steps": 5, "schedule": "cosine"},
        {"schedule": "linear"},
        "--schedule cosine",
    ),
    "min_learning_rate": (
        {"min_learning_rate": 1e-4},
        {"schedule": "cosine"},
        "--schedule linear",
    ),
    "eval_every": ({"eval_every": 5}, {"eval_samples": 8}, "--eval-samples 0"),
    "eval_samples": ({"eval_samples": 12}, {"global_batch": 4}, "--global-batch 8"),
    "placements": (
        {"system": "fsdp", "placements": "zero2", "ranks": 2, "pp_degree": 2},
        {"pp_degree": 1},
        "--pp-degree 2",
    ),
    "init": (
        {"system": "fsdp2", "init": "sharded", "init_from": Path("weights")},
        {"init_from": None},
        "--init-from weights",
    ),
    "random": ({"random": "dist-rng"}, {"system": "plan", "init": "sharded"}, "--init whole"),
    "fingerprint": (
        {"fingerprint": True, "dropout": 0.1, "compile": "aot_eager"},
        {"compile": "none"},
        "--compile aot_eager",
    ),
    "compile": (
        {"system": "plan", "cp": 2, "ranks": 2, "compile": "aot_eager"},
        {"cp": 1, "tp": 2},
        "--cp 2",
    ),
    "activation_checkpointing": (
        {
            "system": "plan",
            "dp_shard": 2,
            "ranks": 2,
            "zero3": True,
            "activation_checkpointing": "selective-op",
        },
        {"zero3": False},
        "--zero3",
    ),
    "activation_checkpointing_every": (
        {"activation_checkpointing_every": 3, "activation_checkpointing": "full"},
        {"activation_checkpointing": "selective-layer"},
        "--activation-checkpointing full",
    ),
    "precision_exclude": (
        {"precision_exclude": "model.*"},
        {"precision": "mxfp8"},
        "--precision none",
    ),
    "overlap": (
        {"system": "plan", "tp": 2, "ranks": 2, "overlap": "tp", "precision": "mxfp8"},
        {"precision": "none"},
        "--precision mxfp8",
    ),
    "checkpoint_async": ({"checkpoint_async": True}, {"checkpoint_every": 5}, "--checkpoint-every"),
    "keep_checkpoints": (
        {"keep_checkpoints": 2, "final_checkpoint": False},
        {"checkpoint_every": 5},
        "--no-final-checkpoint",
    ),
    "profile_steps": ({"profile_steps": "99:101"}, {"steps": 101}, "--steps 100"),
    "count_collectives": ({"count_collectives": 101}, {"steps": 101}, "--steps 100"),
}


@pytest.fixture(autouse=True)
def started_by_hand(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def option(name):
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize("name", PAIRS)
def test_an_option_without_effect_is_refused_with_the_one_that_takes_it(name):
    without, beside, other = PAIRS[name]
    with pytest.raises(UsageError) as refusal:
        validate(TrainConfig(**TEXT | without))
    sentence = str(refusal.value)
    assert re.match(rf"{option(name)}\b.*; ", sentence)
    assert other in sentence
    validate(TrainConfig(**TEXT | without | beside))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_shard": 2, "zero3": True}, "expected no --zero3, .*got --zero3; use --dp-shard"),
        ({"model": "mixtral-tiny", "dp_shard": 2, "ep": 2}, "expected --ep 1, or .*got --ep 2;"),
        (
            {"model": "mixtral-tiny", "tp": 2, "sp": True, "ep": 2},
            "expected --ep 1, or the value of --tp without --sp, .*got --ep 2;",
        ),
        ({"tp": 2, "dropout": 0.1}, "expected --dropout 0 under plan, .*got --dropout 0.1;"),
    ],
)
def test_layers_that_are_not_one_graph_under_plan_are_not_compiled(options, message):
    options = TEXT | {"system": "plan", "ranks": 2} | options
    with pytest.raises(UsageError, match=f"--compile aot_eager: {message}"):
        validate(TrainConfig(**options, compile="aot_eager"))
    validate(TrainConfig(**options))


EXPERTS = {"model": "mixtral-tiny", "ranks": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"system": "fsdp2"},
            "--system plan, whose ranks send tokens to experts, got --system fsd",
        ),
        ({"system": "plan", "dp_shard": 2}, "--ep of at least 2 along --dp-shard, .*got --ep 1"),
        ({"system": "plan", "tp": 2, "ep": 2}, "--ep .* or --tp with --sp, .*got --ep 2"),
    ],
)
def test_dispatched_rows_are_kept_where_ranks_dispatch_tokens(options, message):
    run = EXPERTS | {"activation_checkpointing": "keep-dispatch"}
    with pytest.raises(
        UsageError, match=f"--activation-checkpointing keep-dispatch: expected {message}"
    ):
        validate(TrainConfig(**run | options))
    for accepted in ({"dp_shard": 2}, {"tp": 2, "sp": True}):
        validate(TrainConfig(**run | accepted, system="plan", ep=2, ep_chunks=2))


CONTEXT = {"system": "plan", "cp": 2, "ranks": 2, "dropout": 0.1}


def test_dropout_of_sharded_sequences_needs_dist_rng_on_a_cpu(monkeypatch):
    find_spec = importlib.util.find_spec
    validate(TrainConfig(**TEXT | CONTEXT))
    with monkeypatch.context() as patch:
        device = replace(CPU, type="cuda")
        patch.setattr("integration.train.validation.checks.select_device", lambda *_: device)
        with pytest.raises(UsageError, match=r"--dropout 0.1: expected --device cpu with --cp 2"):
            validate(TrainConfig(**TEXT | CONTEXT))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "dist_rng" else find_spec(name)
    )
    with pytest.raises(UsageError, match=r"--dropout 0.1 with --cp 2 needs the package dist-rng"):
        validate(TrainConfig(**TEXT | CONTEXT))
    validate(TrainConfig(**CONTEXT | {"model": "dit-tiny"}))  # of activations, as beside --tp


def test_fingerprints_of_sharded_sequences_have_no_masks():
    config = TrainConfig(**TEXT | CONTEXT | {"fingerprint": True})
    with pytest.raises(UsageError, match=r"--fingerprint: expected --cp 1 with --dropout.*--cp 2"):
        validate(config)
    validate(replace(config, dropout=0.0))
    validate(TrainConfig(**CONTEXT | {"model": "dit-tiny", "fingerprint": True}))


def test_every_rule_has_a_pair():
    assert {rule.option for rule in RULES} <= PAIRS.keys()


@pytest.mark.parametrize("name", PAIRS)
def test_an_option_at_its_default_counts_as_not_given(name):
    without, _, _ = PAIRS[name]
    default = {each.name: each.default for each in fields(TrainConfig)}[name]
    validate(TrainConfig(**TEXT | without | {name: default}))


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({"system": "single", "init": "sharded"}, False),
        ({"system": "single", "dropout": 0.1}, False),
        ({"system": "ddp", "dropout": 0.1, "ranks": 2}, False),
        ({"system": "fsdp2", "dropout": 0.1, "ranks": 2}, False),
        ({"system": "fsdp2", "init": "sharded", "ranks": 2}, True),
        ({"system": "dtensor-tp", "dropout": 0.1, "ranks": 2}, True),
        ({"system": "dtensor-tp", "dropout": 0.1, "ranks": 2} | DIT, False),
        ({"system": "torchtitan-style", "tp": 2, "sp": True, "dropout": 0.1, "ranks": 2}, False),
        (
            {"system": "torchtitan-style", "tp": 2, "sp": True, "dropout": 0.1, "ranks": 2} | DIT,
            True,
        ),
        ({"system": "plan", "tp": 2, "ranks": 2}, False),
        ({"system": "plan", "tp": 2, "dropout": 0.1, "ranks": 2}, True),
        (PIPELINE | {"dropout": 0.1}, True),
        ({"system": "dtensor-tp", "pp_degree": 2, "dropout": 0.1, "ranks": 4}, False),
        ({"system": "plan", "tp": 2, "pp_degree": 2, "dropout": 0.1, "ranks": 4}, True),
    ],
    ids=str,
)
def test_dist_rng_is_refused_where_no_dtensor_is_drawn(options, drawn):
    config = TrainConfig(**TEXT | options | {"random": "dist-rng"})
    if drawn:
        validate(config)
        return
    with pytest.raises(UsageError, match=r"--random dist-rng: expected .*; leave --random out"):
        validate(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"system": "fsdp", "device": "cpu"},
            "--offload: expected an accelerator, .* got --device",
        ),
        ({"system": "ddp"}, "'ddp' does not take --offload; .* one of: fsdp2, fsdp, plan"),
        (
            {"system": "plan", "tp": 2},
            "--offload: expected --dp-shard of at least 2 .* got --dp-shard 1;",
        ),
        (
            {"system": "plan", "dp_shard": 2, "zero3": True},
            "--offload: expected .* without --zero3",
        ),
    ],
    ids=str,
)
def test_offload_is_refused_where_nothing_can_be(options, message):
    with pytest.raises(UsageError, match=message):
        validate(TrainConfig(**{"device": "sim", "offload": True, "ranks": 2} | options))


def test_ranks_that_join_by_the_environment_have_a_timeout(monkeypatch):
    config = TrainConfig(system="ddp", join_timeout=9.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    validate(config)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(UsageError, match=r"--join-timeout 9: expected ranks that join by RANK"):
        validate(config)


def test_the_number_of_ranks_is_given_or_the_environments(monkeypatch):
    assert validate(TrainConfig(system="ddp", ranks=2)).batch_plan.degree == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert validate(TrainConfig(system="ddp")).batch_plan.degree == 2
    assert validate(TrainConfig(system="ddp"), 1).batch_plan.degree == 1
    with pytest.raises(UsageError, match="expected 1 rank, got 2"):
        validate(TrainConfig(ranks=2))


@pytest.mark.parametrize(
    ("others", "ranks", "number"),
    [
        ({}, 2, 2),
        ({"tp": 2}, 8, 4),
        ({"dp_replicate": 2, "cp": 2}, 8, 2),
        ({"tp": 2}, 2, 1),
        ({"tp": 2, "pp_degree": 2}, 4, 1),
        ({"system": "torchtitan-style", "tp": 2, "sp": True}, 4, 2),
    ],
    ids=str,
)
def test_the_rest_of_the_ranks_is_a_number_once_options_are_validated(others, ranks, number):
    options = TEXT | {"system": "plan", "dp_shard": -1, "micro_batch": 2} | others
    run = validate(TrainConfig(**options), ranks)
    assert run.config.dp_shard == run.system.degrees.dp_shard == number
    assert run.batch_plan.degree == number * options.get("dp_replicate", 1)


@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]], ids=str)
def test_the_command_exits_with_2_before_a_process_starts(ranks, tmp_path, capsys, monkeypatch):
    def started(*_, **__):
        raise AssertionError("ranks were started")

    monkeypatch.setattr("integration.train.__main__.launch", started)
    monkeypatch.setattr("integration.train.__main__.process_group", started)
    out = str(tmp_path / "run")
    wrong = ["--system", "plan", "--cp", "2", "--compile", "aot_eager"]
    assert main([*wrong, "--out", out, *ranks]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("error: --compile aot_eager: expected --cp 1")
    assert "got --cp 2; leave either out" in sentence
    assert not (tmp_path / "run").exists()


def test_a_session_refuses_options_that_its_processes_cannot_share(tmp_path):
    path = tmp_path / "session.json"
    run = ["--model", "llama-tiny", "--system", "ddp", "--ranks", "1"]
    write_session(path, [run, [*run, "--timeout", "9"]])
    with pytest.raises(UsageError, match=r"expected one --timeout .* got .* and .*; give one"):
        read_session(path)


def test_validation_makes_no_process_group():
    script = (
        "import torch.distributed as dist; from integration.train.config import TrainConfig\n"
        "from integration.train.validation import validate\n"
        "validate(TrainConfig(system='fsdp2', ranks=2)); assert not dist.is_initialized()\n"
    )
    result = run_python("-c", script)
    assert result.returncode == 0, result.stderr


def test_a_cosine_does_not_rise():
    with pytest.raises(UsageError, match=r"--min-learning-rate 0\.1: expected at most --learning"):
        validate(TrainConfig(**TEXT, schedule="cosine", min_learning_rate=0.1))
