"""Finding and reading a config.json."""

import json
import os
import subprocess
import sys

import pytest

from ragged_shard.planner.models.config import load_config

VALUES = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    return tmp_path


def put_into_cache(hub):
    model = hub / "models--some--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc123\n")
    (model / "snapshots" / "abc123").mkdir(parents=True)
    (model / "snapshots" / "abc123" / "config.json").write_text(json.dumps(VALUES))


def load_elsewhere(model_id, *, before="", **environment):
    """What load_config says in a process of its own, whose environment decides at import."""
    code = f"{before}\nfrom ragged_shard.planner.models.config import load_config\n" + (
        f"try: print(load_config({model_id!r}).values)\nexcept ValueError as error: print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return run.stdout.strip()


def test_a_file_and_its_folder_are_the_same(folder):
    for path in (folder, folder / "config.json"):
        config = load_config(str(path))
        assert (config.values, config.name, config.architecture) == (VALUES, str(path), "llama")


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_a_hub_id_is_found_in_the_cache(tmp_path, monkeypatch, variable):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    put_into_cache(tmp_path if variable == "HF_HUB_CACHE" else tmp_path / "hub")
    assert load_config("some/model").values == VALUES


def test_a_hub_id_that_cannot_be_fetched_says_why_in_one_line(tmp_path):
    pytest.importorskip("huggingface_hub")
    printed = load_elsewhere("no/where", HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert printed.startswith("no/where could not be downloaded from the hub: ")
    assert "\n" not in printed


def test_a_hub_id_without_huggingface_hub_says_what_to_install(tmp_path):
    without = "import sys; sys.modules['huggingface_hub'] = None"
    printed = load_elsewhere("no/where", before=without, HF_HUB_CACHE=str(tmp_path))
    assert printed.startswith("no/where is neither a path here nor in the Hugging Face cache; ")
    assert printed.endswith("or pip install huggingface_hub, which downloads it")


@pytest.mark.parametrize(
    "path", ["nowhere", "./no/where", "/no/where", "a/b/c", "a/config.json", ""]
)
def test_what_is_neither_a_path_nor_an_id_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    if path:
        message = "expected a config.json, its folder, or a hub id"
    else:
        message = "expected a folder with a config.json"
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected a folder with a config\.json"):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config.json cannot be read as JSON: "),
        ("[1]", r"config.json: expected a JSON object, got a list"),
        ("\udcff", r"config.json cannot be read as JSON: .*utf-8"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        load_config(str(path))
