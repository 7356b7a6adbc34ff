"""Token streams: any part of them is that of the documents and separators, read on demand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.data import TextWindows, open_corpus
from integration.data.corpus import Corpus
from integration.data.tokenizer import train_bpe
from integration.data.tokens import ByteStream, TokenFile, write_tokens
from integration.errors import UsageError


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    for index, text in enumerate(["one", "the second", "3", "x" * 20]):
        (folder / f"{index}.txt").write_text(text)
    return folder


@given(start=st.integers(0, 36), length=st.integers(0, 37))
def test_a_part_of_a_byte_stream_is_that_of_the_joined_documents(documents, start, length):
    joined = b"one\0the second\0003\0" + b"x" * 20
    stream = ByteStream(open_corpus(documents))
    assert len(stream) == len(joined) == 37
    stop = min(start + length, len(joined))
    found = stream.read(start, stop)
    assert found.dtype == np.uint8
    assert bytes(found) == joined[start:stop]


def test_a_file_that_becomes_shorter_is_named(tmp_path):
    path = tmp_path / "text"
    path.write_text("0123456789")
    stream = ByteStream(open_corpus(path))
    path.write_text("01234")
    with pytest.raises(UsageError, match=r"text has become shorter while the run reads it"):
        stream.read(3, 8)


@pytest.mark.parametrize(("size", "dtype"), [(300, np.uint16), (2**16, np.uint16)])
def test_the_file_of_tokens_has_documents_and_an_end_of_text_behind_each(tmp_path, size, dtype):
    texts = ["def f():\n    return 1\n", "", "# ünïcode € and <|endoftext|>\n", "\n\n\tx" * 900]
    (tmp_path / "text").mkdir()
    for index, text in enumerate(texts):
        (tmp_path / "text" / str(index)).write_text(text)
    corpus = open_corpus(tmp_path / "text")
    tokenizer = train_bpe([*texts, "abcdefgh" * 5] * 3, 280)
    tokenizer.vocabulary = size
    path = tmp_path / "new" / "tokens.bin"
    write_tokens(corpus, tokenizer, path)
    stream = TokenFile(path, size, tokenizer.end)
    tokens = stream.read(0, len(stream))
    assert tokens.dtype == dtype
    ends = np.flatnonzero(tokens == tokenizer.end)
    parts = [part[part != tokenizer.end].tolist() for part in np.split(tokens, ends + 1)]
    assert [tokenizer.decode(part) for part in parts] == [text for text in texts if text] + [""]
    assert [path.name for path in path.parent.iterdir()] == ["tokens.bin"]
    assert stream.read(3, 9).tolist() == tokens[3:9].tolist()


def test_ids_beyond_16_bits_have_32(tmp_path):
    class Large:
        vocabulary, end = 2**16 + 1, 2**16

        def encode(self, texts):
            return [[70_000] * len(text) for text in texts]

    (tmp_path / "a").write_text("abc")
    write_tokens(open_corpus(tmp_path / "a"), Large(), tmp_path / "tokens.bin")
    assert TokenFile(tmp_path / "tokens.bin", 2**16 + 1, 2**16).read(0, 4).tolist() == [
        70_000
    ] * 3 + [2**16]


def test_a_failed_write_leaves_no_file(tmp_path):
    missing = Corpus((tmp_path / "gone",), (5,), "made up")
    with pytest.raises(UsageError, match=r"cannot read .*gone"):
        write_tokens(missing, train_bpe(["aaabdaaabac"], 257), tmp_path / "tokens" / "t.bin")
    assert list((tmp_path / "tokens").iterdir()) == []


def test_windows_are_cut_through_the_stream(documents):
    corpus = open_corpus(documents)
    windows = TextWindows(ByteStream(corpus), 5, source="", size=corpus.size, fingerprint="")
    assert len(windows) == 7
    assert bytes(windows.sample(2, 0)["input_ids"].tolist()) == b"cond\0"
    assert bytes(windows.sample(0, 0)["labels"].tolist()) == b"one\0t"
    windows.require(7)
    with pytest.raises(UsageError, match=r"the data has 37 bytes, fewer than the 40 of one global"):
        windows.require(8)
