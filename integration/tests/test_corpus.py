import pytest

from integration.data import load_corpus
from integration.errors import UsageError


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("first")
    (tmp_path / "c.txt").write_text("")
    assert bytes(load_corpus(tmp_path).data.tolist()) == b"first\0second"


def test_a_file_is_its_bytes(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(range(256)))
    corpus = load_corpus(path)
    assert bytes(corpus.data.tolist()) == bytes(range(256))
    assert corpus.source == str(path)


def test_the_default_is_the_standard_library_and_nothing_installed_beside_it():
    corpus = load_corpus(None)
    text = bytes(corpus.data.tolist())
    assert len(text) > 5_000_000
    assert b"class JSONDecoder" in text
    # pip's and torch's sources live below the same folder, in site-packages.
    assert b"class PackageFinder" not in text


def test_the_fingerprint_follows_the_bytes(tmp_path):
    path = tmp_path / "x"
    path.write_text("one")
    first = load_corpus(path).fingerprint
    path.write_text("two")
    assert load_corpus(path).fingerprint != first


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere does not exist; give --data"):
        load_corpus(tmp_path / "nowhere")


def test_a_folder_without_bytes_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UsageError, match="contains no bytes"):
        load_corpus(tmp_path)
