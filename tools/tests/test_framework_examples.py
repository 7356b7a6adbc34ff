"""The examples with other frameworks train as the frameworks do with their own FSDP2."""

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fsdp.integrations import TESTED
from tools.workspace import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("*/train.py"))


def test_there_is_an_example_for_each_row_of_the_readme():
    rows = (ROOT / "examples" / "README.md").read_text()
    assert SCRIPTS
    assert all(f"| `{script.parent.name}` |" in rows for script in SCRIPTS)


def test_the_versions_that_fsdp_calls_tested_are_those_pinned():
    lines = [
        line
        for file in ("constraints.txt", "examples/requirements.txt")
        for line in (ROOT / file).read_text().splitlines()
    ]
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    for framework, tested in TESTED.items():
        assert pins[framework] in tested, framework
    assert {script.parent.name for script in SCRIPTS} == set(TESTED)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_a_page_begins_with_pip_and_has_the_command_and_the_tested_version(script):
    name = script.parent.name
    text = (ROOT / "docs" / "frameworks" / f"{name}.md").read_text()
    command = f"python {script.relative_to(ROOT)} --ranks 2 --steps 4"
    assert 0 < text.index("pip install") < text.index(command)
    index = (ROOT / "docs" / "frameworks" / "index.md").read_text()
    assert re.search(rf"^\| \w+ \| {TESTED[name]} \| .*\({name}\.md\) \|$", index, re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_a_picture_of_losses_stands_beside_the_command_that_draws_it(script):
    name = script.parent.name
    page = ROOT / "docs" / "frameworks" / f"{name}.md"
    drawn = page.with_suffix(".svg").is_file()
    command = f"python {script.relative_to(ROOT)} --ranks 2 --steps"
    shown = re.search(rf"^{command} .*--plot docs/frameworks/{name}.svg$", page.read_text(), re.M)
    assert drawn == (shown is not None) == (f"]({name}.svg)" in page.read_text())


def test_a_picture_has_a_curve_of_each_system_and_case(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from side_by_side import Comparison, Run, draw

    run = Run([2.0, 1.0], 1.0, 1.0)
    draw([Comparison(case, run, run, 1e-5, 0.0) for case in ("", "muon")], tmp_path / "one.svg")
    text = (tmp_path / "one.svg").read_text()
    for label in ("native FSDP2", "fsdp", "muon native FSDP2", "muon fsdp", "optimizer step"):
        assert f"<!-- {label} -->" in text


# Its losses differ by half between the systems; it appends to a file when it is imported.
EXAMPLE = """
import os

import torch.distributed as dist

with open(os.environ["IMPORTS"], "a") as file:
    file.write("imported ")
from side_by_side import main

systems = []


def train(system, steps):
    systems.append(system)
    dist.init_process_group("gloo")
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (dist.get_rank(), systems))
    dist.destroy_process_group()
    assert gathered == [(0, [system]), (1, [system])]
    return [1.0 + (system == "fsdp") / 2] * steps


if __name__ == "__main__":
    main(train)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "imports"),
    [(["--tiny"], 1), pytest.param(["--steps", "2"], 5, marks=pytest.mark.slow)],
    ids=["forked", "spawned"],
)
def test_ranks_share_no_state_and_losses_that_differ_are_an_error(tmp_path, size, imports):
    (tmp_path / "train.py").write_text(EXAMPLE)
    search = os.pathsep.join([str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    own = {"IMPORTS": str(tmp_path / "imports"), "PYTHONPATH": search}
    command = [sys.executable, str(tmp_path / "train.py"), *size, "--json", str(tmp_path / "found")]
    done = subprocess.run(
        command, timeout=300, stderr=subprocess.PIPE, text=True, env=os.environ | own
    )
    assert done.returncode == 1
    assert "expected 2 losses within 1e-05 of native FSDP2's, got 5.0e-01" in done.stderr
    (found,) = json.loads((tmp_path / "found").read_text())
    assert (found["native"]["losses"], found["fsdp"]["losses"]) == ([1.0, 1.0], [1.5, 1.5])
    assert (tmp_path / "imports").read_text() == "imported " * imports


# What is left of accelerate's own scripts without its data sets and metrics.
OWN_SCRIPT = """
import sys

import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

accelerator = Accelerator()
set_seed(0)
tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * RATE)
tokens = tokenizer(["ba ben", "dio dul"], return_tensors="pt")["input_ids"]
data = torch.utils.data.DataLoader(tokens.repeat(4, 1), 2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    loss = model(input_ids=batch, labels=batch[:, 0] % 2).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print("epoch 0:", loss.item())
if __name__ == "__main__":
    accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_scripts_of_accelerate_run_unchanged_and_those_that_differ_are_errors(tmp_path):
    of_fsdp = "(2 if 'fsdp.integrations' in sys.modules else 1)"
    scripts = {
        "nlp_example.py": OWN_SCRIPT.replace("RATE", "1"),
        "by_feature/memory.py": OWN_SCRIPT.replace("RATE", of_fsdp),
        "by_feature/profiler.py": "import not_installed\n" + OWN_SCRIPT,
        "by_feature/local_sgd.py": OWN_SCRIPT,
        "later.py": OWN_SCRIPT,
        "utils.py": "",
    }
    template = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sync_module_states": True}}
    written = {"config_yaml_templates/fsdp.yaml": json.dumps(template), **scripts}
    for name, text in written.items():
        file = tmp_path / "examples" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    command = [sys.executable, str(ROOT / "examples" / "accelerate" / "own_scripts.py")]
    command += ["--accelerate", str(tmp_path), "--json", str(tmp_path / "found.json")]
    assert subprocess.run(command, timeout=900).returncode == 1
    found = {one.pop("script"): one for one in json.loads((tmp_path / "found.json").read_text())}
    assert set(found) == set(scripts) - {"utils.py"}
    equal, other = found["nlp_example.py"], found["by_feature/memory.py"]
    assert equal == {"losses": 4, "difference": 0, "weights": 0, "error": "", "left_out": ""}
    assert other["losses"] == 4
    assert other["weights"] > 0.1
    assert "losses differ" in other["error"]
    assert "not_installed not installed" in found["by_feature/profiler.py"]["left_out"]
    assert "refuses FSDP" in found["by_feature/local_sgd.py"]["left_out"]
    assert "not known here" in found["later.py"]["left_out"]


@pytest.fixture
def own_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "accelerate"))
    return importlib.import_module("own_scripts")


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({}, ""),
        ({"losses": [[1.0, 0.5], [1.0, 0.25]]}, "losses differ by 2.5e-01"),
        ({"losses": [[1.0, 0.5], [1.0, float("nan")]]}, "losses differ by nan"),
        ({"losses": [[1.0], [1.0]]}, "expected equally many weights"),
        ({"printed": [0.5]}, "losses differ by 2.5e-01"),
        ({"printed": []}, "expected equally many weights"),
        ({"end": torch.tensor([2.0, 4.0])}, "weights by 0.5"),
        ({"end": torch.tensor([2.0, float("nan")])}, "weights by nan"),
        ({"placements": frozenset()}, "expected Shard and RaggedShard"),
    ],
)
def test_a_run_that_differs_or_is_not_sharded_by_fsdp_is_an_error(own_scripts, changed, error):
    losses, start, end = [[1.0, 0.5], [1.0, 0.5]], torch.ones(2), torch.tensor([2.0, 3.0])
    native = own_scripts.Record(frozenset({"Shard"}), losses, start, end, [0.75])
    own = replace(native, placements=frozenset({"RaggedShard"}))
    result = own_scripts.compare(
        own_scripts.Script("a.py"), [{"native": native, "fsdp": replace(own, **changed)}]
    )
    assert (result.losses, bool(result.error)) == (0 if "expected" in error else 4, bool(error))
    assert error in result.error


@pytest.mark.parametrize(
    ("ends_in", "returncode", "log", "error"),
    [
        ("", 0, "epoch 0", ""),
        ("", 1, "[rank0]: KeyError: 1\nlauncher", "it fails:\n[rank0]: KeyError: 1"),
        ("save", 1, '[rank0]:   File "a.py", line 3, in save\nlauncher', ""),
        ("save", 1, '[rank0]:   File "a.py", line 3, in load', "expected an error in save, got"),
        ("save", 0, "epoch 0", "expected an error in save, got exit status 0"),
    ],
)
def test_a_script_ends_as_it_does_with_native_fsdp2(own_scripts, ends_in, returncode, log, error):
    script = own_scripts.Script("a.py", ends_in=ends_in)
    found = own_scripts.unexpected_end(script, returncode, log)
    assert found.startswith(error)
    assert bool(found) == bool(error)


def test_training_that_changes_no_weight_is_an_error(own_scripts):
    same = own_scripts.Record(
        frozenset({"Shard", "RaggedShard"}), [[1.0]], *[torch.ones(2)] * 2, []
    )
    result = own_scripts.compare(own_scripts.Script("a.py"), [{"native": same, "fsdp": same}])
    assert "weights by nan" in result.error


def test_accelerates_package_without_scripts_is_refused(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "accelerate" / "own_scripts.py")]
    command += ["--accelerate", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "expected a clone of huggingface/accelerate" in done.stderr
