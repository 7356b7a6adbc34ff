"""Training on tokens: where the tokenizer and the tokens are written, and what resumes."""

from pathlib import Path

import numpy as np
import pytest

import integration.data
from integration.data import open_corpus
from integration.data.preparation import Tokenization, on_some_ranks, prepare_text
from integration.data.tokenizer import read_tokenizer, train_bpe
from integration.errors import UsageError
from integration.train.checkpoint.checkpoint import FOLDER, read_manifest
from integration.train.config import TrainConfig
from integration.train.validation import validate
from testkit import run_ranks

TEXT = Path(integration.data.__file__).parent
VOCABULARY = 300
RUN = {"tokenizer": f"bpe:{VOCABULARY}", "data": TEXT}


def tokens_of(run):
    (file,) = (run / "data").iterdir()
    return file


def test_the_run_folder_has_the_tokenizer_and_all_tokens(tmp_path):
    windows = prepare_text(TEXT, 32, Tokenization(RUN["tokenizer"], tmp_path))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.vocabulary == VOCABULARY
    assert windows.tokenizer == tokenizer.fingerprint
    corpus = open_corpus(TEXT)
    assert (windows.fingerprint, windows.size) == (corpus.fingerprint, corpus.size)
    tokens = np.fromfile(tokens_of(tmp_path), np.uint16)
    assert (tokens == tokenizer.end).sum() == len(corpus.files)
    assert windows.sample(2, 0)["input_ids"].tolist() == tokens[64:96].tolist()
    assert len(windows) == len(tokens) // 32


def test_the_tokens_are_written_once(tmp_path):
    how = Tokenization(RUN["tokenizer"], tmp_path)
    prepare_text(TEXT, 32, how)
    first = tokens_of(tmp_path).stat().st_mtime_ns
    prepare_text(TEXT, 16, how)
    assert tokens_of(tmp_path).stat().st_mtime_ns == first


def test_a_resumed_run_does_not_train_its_tokenizer_again(tmp_path, monkeypatch):
    how = Tokenization(RUN["tokenizer"], tmp_path)
    expected = prepare_text(TEXT, 32, how).tokenizer
    monkeypatch.setattr("integration.data.preparation.train_bpe", None)
    resumed = Tokenization(RUN["tokenizer"], tmp_path / "new", resumed=tmp_path)
    assert prepare_text(TEXT, 32, resumed).tokenizer == expected
    assert read_tokenizer(tmp_path / "new" / "tokenizer.json").fingerprint == expected


@pytest.mark.parametrize("kind", ["bpe:280", "file"])
def test_another_tokenizer_than_the_checkpoints_is_refused_and_that_is_not_replaced(tmp_path, kind):
    run = tmp_path / "run"
    prepare_text(TEXT, 32, Tokenization(RUN["tokenizer"], run))
    before = (run / "tokenizer.json").read_text()
    if kind == "file":
        kind = str(tmp_path / "other.json")
        Path(kind).write_text(train_bpe(["abc" * 9], 259).json)
    with pytest.raises(UsageError, match=r"--tokenizer .*expected the tokenizer of .*tokenizer\.j"):
        prepare_text(TEXT, 32, Tokenization(kind, run, resumed=run))
    assert (run / "tokenizer.json").read_text() == before


def test_the_models_vocabulary_is_the_tokenizers():
    shape = validate(TrainConfig(model="llama-tiny", **RUN)).shape
    assert shape.vocab_size == VOCABULARY
    assert validate(TrainConfig(model="llama-tiny")).shape.vocab_size == 256


def test_a_model_without_text_has_no_tokenizer():
    with pytest.raises(UsageError, match=r"--tokenizer bpe:300: expected a language model"):
        validate(TrainConfig(model="dit-tiny", tokenizer="bpe:300"))


def _work_on_rank_1(fails):
    import torch.distributed as dist

    def work():
        if fails:
            raise fails
        return "done"

    try:
        return on_some_ranks(work, enabled=dist.get_rank() == 1)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.ranks
def test_all_ranks_get_the_result_or_the_error_of_the_rank_that_works():
    assert run_ranks(_work_on_rank_1, 2, None) == [["done"], ["done"]]
    for each in run_ranks(_work_on_rank_1, 2, UsageError("refused")):
        assert each == ("UsageError", "refused")
    found = run_ranks(_work_on_rank_1, 2, OSError(28, "disk full"))
    assert found == [
        ("RuntimeError", "rank 1: [Errno 28] disk full"),
        ("OSError", "[Errno 28] disk full"),
    ]


def _long_work(seconds):
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from integration.data import preparation

    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=seconds / 2))
    preparation._SECONDS_BETWEEN_COLLECTIVES = seconds / 10
    try:
        return on_some_ranks(lambda: time.sleep(seconds), enabled=dist.get_rank() == 0)
    finally:
        backend._set_default_timeout(timedelta(seconds=300))


@pytest.mark.ranks
def test_work_may_take_longer_than_the_timeout_of_a_collective():
    assert run_ranks(_long_work, 2, 4.0) == [[None], [None]]


@pytest.mark.ranks
def test_a_run_resumes_at_another_product_with_the_same_tokens(train_runs, tmp_path):
    (straight,) = train_runs(1, [RUN], out=tmp_path / "straight", steps=4)
    one = {**RUN, "system": "fsdp2", "save_at": 2, "out": tmp_path / "first"}
    (first,) = train_runs(2, [one], out=tmp_path, steps=2)
    path = tmp_path / "first" / FOLDER / "step-00000002"
    tokenizer = tmp_path / "first" / "tokenizer.json"
    assert read_manifest(path).identity.tokenizer == read_tokenizer(tokenizer).fingerprint
    other = {"system": "plan", "tp": 2, "loss_parallel": True, "resume": str(path)}
    (second,) = train_runs(2, [RUN | other], out=tmp_path / "second", steps=4)
    assert first + second == pytest.approx(straight, rel=0, abs=1e-5)
    assert len({*straight}) == 4
    assert tokens_of(tmp_path / "first").read_bytes() == tokens_of(tmp_path / "second").read_bytes()


@pytest.mark.ranks
def test_a_checkpoint_of_bytes_or_of_another_tokenizer_is_refused(train_runs, tmp_path):
    run = RUN | {"save_at": 1, "out": tmp_path / "run"}
    train_runs(1, [run], out=tmp_path, steps=1)
    given = {"resume": str(tmp_path / "run" / FOLDER / "step-00000001"), "out": tmp_path / "new"}
    with pytest.raises(
        Exception, match=r"model\.vocab_size: expected 256, as in this run, got 300"
    ):
        train_runs(1, [{"data": TEXT} | given], out=tmp_path, steps=2)
    (tmp_path / "run" / "tokenizer.json").unlink()
    other = train_bpe([block.text.upper() for block in open_corpus(TEXT).blocks()], VOCABULARY)
    (tmp_path / "other.json").write_text(other.json)
    with pytest.raises(Exception, match=r"another run: tokenizer: expected '[0-9a-f]{64}', as in"):
        train_runs(1, [RUN | given | {"tokenizer": str(tmp_path / "other.json")}], out=tmp_path)
