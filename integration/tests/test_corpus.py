import hashlib

import pytest

from integration.data import open_corpus
from integration.data.tokens import ByteStream
from integration.errors import UsageError


def text_of(corpus):
    stream = ByteStream(corpus)
    return bytes(stream.read(0, len(stream)))


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("first")
    (tmp_path / "c.txt").write_text("")
    corpus = open_corpus(tmp_path)
    assert text_of(corpus) == b"first\0second"
    assert corpus.size == len(b"first\0second")
    assert corpus.fingerprint == hashlib.sha256(b"first\0second").hexdigest()


def test_a_file_is_its_bytes(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(range(256)))
    corpus = open_corpus(path)
    assert text_of(corpus) == bytes(range(256))
    assert corpus.source == str(path)


def test_the_default_is_the_standard_library_and_nothing_installed_beside_it():
    corpus = open_corpus(None)
    text = text_of(corpus)
    assert len(text) > 5_000_000
    assert b"class JSONDecoder" in text
    # pip's and torch's sources live below the same folder, in site-packages.
    assert b"class PackageFinder" not in text


def test_the_fingerprint_follows_the_bytes(tmp_path):
    path = tmp_path / "x"
    path.write_text("one")
    first = open_corpus(path).fingerprint
    path.write_text("two")
    assert open_corpus(path).fingerprint != first


def test_text_is_read_in_blocks_which_end_with_lines_and_divide_no_character(tmp_path, monkeypatch):
    monkeypatch.setattr("integration.data.corpus._BLOCK", 8)
    (tmp_path / "a").write_text("first line\nsecond line\n")
    (tmp_path / "b").write_bytes("äöü€".encode() * 10 + b"\xff")
    blocks = list(open_corpus(tmp_path).blocks())
    assert [block.text for block in blocks[:3]] == ["first line\n", "second line\n", ""]
    assert [index for index, block in enumerate(blocks) if block.ends_document] == [
        2,
        len(blocks) - 1,
    ]
    assert "".join(block.text for block in blocks[3:]) == "äöü€" * 10 + "\N{REPLACEMENT CHARACTER}"


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere does not exist; give --data"):
        open_corpus(tmp_path / "nowhere")


def test_a_folder_without_bytes_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UsageError, match="contains no bytes"):
        open_corpus(tmp_path)
