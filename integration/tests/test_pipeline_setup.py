"""What a pipeline refuses before anything is written."""

import pytest

from integration.errors import UsageError
from integration.train.__main__ import main
from integration.train.config import TrainConfig
from integration.train.setup import prepare

TINY = {"model": "llama-tiny", "pp_degree": 2}


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"pp_degree": 2}, 3, "--pp-degree: expected a divisor of the 3 ranks, got 2"),
        ({"pp_degree": 5, "pp_schedule": "GPipe"}, 5, "at most 4 stages for 2 layers, got 5"),
        ({"pp_schedule": "nope"}, 2, "unknown schedule 'nope'; choose one of: GPipe, 1F1B, Inter"),
        ({"pp_microbatches": 3}, 2, "expected a divisor of --micro-batch 4, got 3"),
        ({"pp_microbatches": 1}, 2, "expected at least 2 for schedule 1F1B on 2 stages, got 1"),
        (
            {"micro_batch": 5, "global_batch": 5, "pp_schedule": "InterleavedZeroBubble"}, 2,
            "--pp-microbatches: expected 2 equal rounds",
        ),
        (
            {"pp_split_points": "model.layers.0,model.layers.1"}, 2,
            "2 split points make 3 stages, and schedule 1F1B has 1 on each of 2 ranks; give 1 spl",
        ),
        (
            {"pp_split_points": "model.layers.1", "pp_schedule": "Interleaved1F1B"}, 2,
            "Interleaved1F1B has a whole number of at least 2 on each of 2 ranks; give 3 or more",
        ),
        ({"pp_split_points": "model.layers.7"}, 2, "got 'model.layers.7'; give one that a stage"),
        ({"pp_split_points": "model.embed_tokens"}, 2, "embed_tokens' after the first stage"),
        (
            {
                "pp_split_points": "model.layers.1,model.layers.0,lm_head",
                "pp_schedule": "DualPipeV",
            },
            2,
            "got 'model.layers.0' after 'model.layers.1'",
        ),
        ({"system": "fsdp1"}, 4, "system 'fsdp1' does not support --pp-degree; use one of: single"),
        (
            {"model": "llama-tied-tiny", "pp_schedule": "ZBVZeroBubble"}, 2,
            "embed_tokens.weight, which is tied to lm_head.weight, on stages of two ranks or on one"
            " stage, got stages 0 and 3 of one rank; use --pp-schedule 1F1B",
        ),
        ({"system": "plan", "tp": 4}, 4, "number of ranks, 2, got 4 .tp 4.;"),
        ({"pp_split_points": "model.t_embedder", "model": "dit-tiny"}, 2, "got 'model.t_embedder'"),
        (
            {"system": "fsdp2", "dropout": 0.1, "random": "dist-rng"}, 4,
            "system 'fsdp2.pp' draws none",
        ),
        ({"system": "single"}, 4, "system 'single': expected 1 rank, got 2"),
        ({"fingerprint": True}, 2, "--fingerprint: expected --pp-degree 1"),
        ({"init": "sharded"}, 2, "expected --init whole, as it shards existing weights"),
    ],
)  # fmt: skip
def test_a_pipeline_that_cannot_run_is_refused(tmp_path, options, ranks, message):
    config = TrainConfig(out=tmp_path / "run", **TINY | options)
    with pytest.raises(UsageError, match=message):
        prepare(config, ranks)
    assert not (tmp_path / "run").exists()


def test_the_command_says_one_sentence_and_exits_with_2(tmp_path, capsys):
    out = str(tmp_path / "run")
    arguments = ["--pp-degree", "2", "--pp-schedule", "zb", "--ranks", "2", "--out", out]
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: unknown schedule 'zb'; choose one of: GPipe")
    assert not (tmp_path / "run").exists()
