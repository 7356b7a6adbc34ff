"""Tokenizers: trained here or read from a file; and which values of the option are refused."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    bpe_size,
    read_tokenizer,
    train_bpe,
    vocabulary_of,
)
from integration.errors import UsageError

TEXTS = ["def f(x):\n    return x + 1\n", "class A:\n    def f(self):\n        return 2\n"] * 5


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 280)


@given(text=st.text(max_size=60))
def test_encoded_text_decodes_to_itself(bpe, text):
    for tokenizer in (bpe, ByteTokenizer()):
        (tokens,) = tokenizer.encode([text])
        assert tokenizer.decode(tokens) == text
        assert all(0 <= token < tokenizer.vocabulary for token in tokens)


def test_merges_make_fewer_tokens_than_bytes(bpe):
    (tokens,) = bpe.encode([TEXTS[0]])
    assert len(tokens) < len(TEXTS[0]) / 2
    assert bpe.vocabulary == 280
    assert bpe.end == 0


def test_text_cannot_contain_the_end_of_a_document(bpe):
    (tokens,) = bpe.encode(["<|endoftext|>"])
    assert bpe.end not in tokens
    assert bpe.decode([bpe.end]) == "<|endoftext|>"


def test_two_processes_train_the_same_tokenizer(bpe):
    code = (
        "import sys\nfrom integration.data.tokenizer import train_bpe\n"
        f"print(train_bpe({TEXTS!r}, 280).fingerprint)"
    )
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert found.stdout.strip() == bpe.fingerprint


def test_a_file_is_read_back_without_its_truncation_and_padding(bpe, tmp_path):
    content = json.loads(bpe.json)
    content["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    found = read_tokenizer(path)
    assert found.encode(TEXTS) == bpe.encode(TEXTS)
    assert found.fingerprint != bpe.fingerprint
    path.write_text(bpe.json)
    assert read_tokenizer(path).fingerprint == bpe.fingerprint
    assert vocabulary_of(str(path)) == 280


def test_the_vocabulary_counts_ids_that_no_token_has(bpe):
    content = json.loads(bpe.json)
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    assert vocabulary[last] == 279
    vocabulary[last] = 400
    assert FileTokenizer(json.dumps(content), "made up").vocabulary == 401


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("bpe:", "expected bpe:N with a number of tokens of at least 257"),
        ("bpe:256", "at least 257"),
        ("bpe:-300", "at least 257"),
        ("bpe:٤٠٠", "at least 257"),
        ("nowhere.json", "expected bytes, bpe:N or a tokenizer.json, got nowhere.json"),
    ],
)
def test_other_values_are_refused(option, message):
    with pytest.raises(UsageError, match=message):
        vocabulary_of(option)


def test_bytes_are_256_and_a_trained_tokenizer_has_its_number():
    assert vocabulary_of("bytes") == 256
    assert vocabulary_of("bpe:257") == 257
    assert bpe_size("x.json") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "which it cannot read"),
        (b"\xff", "is not UTF-8"),
        (
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
            r"have a token that separates documents, one of <\|endoftext\|>",
        ),
    ],
    ids=["another JSON", "no text", "no end"],
)
def test_other_files_are_refused(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_tokenizer(path)


def test_a_text_with_too_few_repetitions_is_refused_with_the_number_it_has():
    with pytest.raises(UsageError, match=r"bpe:500: .* got one for 262; give bpe:262"):
        train_bpe(["aaaa bbbb"], 500)
