"""The command line as a user meets it."""

import json
import os
import subprocess
import sys

import pytest

from ragged_shard.planner import plan_layout
from ragged_shard.planner.command_line.command import main
from ragged_shard.planner.models.presets import preset_model
from ragged_shard.planner.models.shapes import specs_of
from testkit.inspection.imports import loaded_by

TOY = {
    "model_type": "mixtral",
    "vocab_size": 50,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "head_dim": 3,
}
HEAVY = {"torch", "numpy", "rich", "matplotlib", "huggingface_hub", "transformers"}


@pytest.fixture
def toy(tmp_path):
    pytest.importorskip("transformers", minversion="5")
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TOY))
    return str(folder)


def run(*arguments, code="", **environment):
    """The command line in a process of its own, after ``code``."""
    module = "ragged_shard.planner.command_line.command"
    script = f"{code}\nfrom {module} import main\nraise SystemExit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments] if code
        else [sys.executable, "-m", "ragged_shard.planner", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )  # fmt: skip


def fails(capsys, *arguments):
    """The one line that ends the command line with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert printed.count("\n") == 1
    return printed.removeprefix("python -m ragged_shard.planner: ").strip()


def test_it_prints_a_line_for_every_world_size_and_granularity():
    ended = run("--preset", "gpt-oss-120b", "--world-size", "8:32", "--rows", "16,128")
    assert (ended.returncode, ended.stderr) == (0, "")
    first, second, *lines = ended.stdout.splitlines()
    assert first == ("gpt-oss-120b: 116,829,156,672 parameters in 37 groups; sizes in elements")
    assert second == "blocks of rows in expert matrices; tensors in the order 'given'"
    found = [line.split() for line in lines if line.rstrip().endswith("smallest")]
    assert [(line[0], line[1]) for line in found] == [
        (rows, ranks) for rows in ("16", "128") for ranks in ("8", "16", "32")
    ]
    layer, root = (preset_model("gpt-oss-120b").groups[index] for index in (0, -1))
    layouts = [plan_layout(specs_of(group, 128, "experts"), 32) for group in (layer, root)]
    per_rank = 36 * layouts[0].shard_size + layouts[1].shard_size
    padding = 36 * layouts[0].padding + layouts[1].padding
    assert found[-1][2] == f"{per_rank:,}"
    assert found[-1][3] == f"{100 * padding / 116_829_156_672:.3f}"


def test_the_table_is_plain_where_rich_is_missing():
    ended = run(
        "--preset", "llama3-8b", "--world-size", "8", code="import sys; sys.modules['rich'] = None"
    )
    assert ended.returncode == 0
    assert ended.stderr == "a table with colours needs rich: pip install ragged-shard[plot]\n"
    assert "rows  ranks       per rank" in ended.stdout


def test_a_picture_without_matplotlib_ends_in_a_sentence_before_any_work(tmp_path):
    missing = "import sys; sys.modules['matplotlib'] = None"
    ended = run("--preset", "llama3-8b", "--plot", str(tmp_path / "new"), code=missing)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "python -m ragged_shard.planner: --plot needs matplotlib: pip install ragged-shard[plot]\n"
    )
    assert not (tmp_path / "new").exists()


def test_a_model_from_its_config_and_all_it_can_say(toy, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    written = tmp_path / "figures.json"
    pictures = tmp_path / "deep" / "pictures"
    assert main([
        "--from-model", toy, "--world-size", "2,3,40", "--rows", "4", "--recommend", "--explain",
        "--tolerance", "0", "--json", str(written), "--plot", str(pictures), "--alignment", "2",
    ]) == 0  # fmt: skip
    printed = capsys.readouterr().out
    found = json.loads(written.read_text())
    assert (found["alignment"], found["rows_apply_to"]) == (2, "experts")
    assert [point["world_size"] for point in found["points"]] == [2, 3, 40]
    (chosen,) = found["recommended"]
    assert chosen["world_size"] == 2  # 3 ranks pad 0.7 % more, which no tolerance lets pass
    assert f"4 rows: shard over {chosen['world_size']} ranks" in printed
    worst = max(found["points"], key=lambda point: point["padding_ratio"])
    assert f"{worst['worst_group']}, {worst['world_size']} ranks, 4 rows:" in printed
    assert sorted(path.name for path in pictures.iterdir()) == [
        f"toy-{what}.{kind}" for what in ("layout", "padding") for kind in ("png", "svg")
    ]
    assert printed.count("wrote ") == 5
    # The layout's picture is of a size that can be read, though 40 ranks pad more.
    assert "3 ranks, blocks of 4 rows" in "".join(
        line for line in (pictures / "toy-layout.svg").read_text().splitlines() if "<!--" in line
    )


def test_one_group_has_blocks_as_in_the_whole_model(toy, capsys):
    arguments = ["--from-model", toy, "--world-size", "4", "--rows", "4", "--group"]
    assert main([*arguments, "root"]) == 0  # which has no experts
    assert (
        " parameters in group root; sizes in elements\nblocks of rows in expert"
        in capsys.readouterr().out
    )
    assert main([*arguments, "layers.1"]) == 0
    assert "layers.1  " in capsys.readouterr().out


def test_the_target_and_the_order_are_printed_and_reach_the_planner(toy, capsys, tmp_path):
    written = {}
    for target in ("experts", "all", "w1|w3"):
        file = tmp_path / "out.json"
        main(["--from-model", toy, "--world-size", "4", "--rows", "8", "--rows-apply-to", target,
              "--order", "block", "--json", str(file)])  # fmt: skip
        written[target] = json.loads(file.read_text())["points"][0]["shard_size"]
    printed = capsys.readouterr().out
    assert "blocks of rows in all matrices; tensors in the order 'block'" in printed
    assert "blocks of rows in matrices matching 'w1|w3'" in printed
    assert len(set(written.values())) == 3


def test_experts_and_multi_token_prediction_can_be_chosen(toy, capsys):
    assert main(["--from-model", toy, "--experts", "stacked", "--group", "layers.0"]) == 0
    main(
        [
            "--preset",
            "deepseek-v3",
            "--mtp",
            "--group",
            "layers.61",
            "--world-size",
            "8",
            "--rows",
            "1",
        ]
    )
    assert "deepseek-v3: 11,610,068,224 parameters in group layers.61" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "llama4"], "expected one of the presets llama3-8b"),
        (["--preset", "llama3-8b", "--order", "random"], "random"),
        (["--preset", "llama3-8b", "--group", "layers.32"], "to 'root', got 'layers.32'"),
        (["--preset", "llama3-8b", "--rows-apply-to", "experts"], "no matrix matches 'experts'"),
        (["--preset", "llama3-8b", "--mtp"], "no layers of multi-token prediction"),
        (["--preset", "gpt-oss-120b", "--experts", "separate"], "expected 'stacked'"),
        (["--preset", "llama3-8b", "--world-size", str(2**63)], str(2**63)),
        (["--from-model", "/nowhere/config.json"], "its folder, or a hub id"),
        (["--preset", "llama3-8b", "--world-size", "8", "--json", "/nowhere/x"], "/nowhere/x"),
    ],
)  # fmt: skip
def test_bad_input_ends_in_one_sentence_that_names_it(arguments, message, capsys):
    assert message in fails(capsys, *arguments)


def test_an_unknown_architecture_is_named(tmp_path, capsys):
    pytest.importorskip("transformers", minversion="5")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mamba-9"}))
    printed = fails(capsys, "--from-model", str(path))
    assert "cannot build a 'mamba-9' from this configuration" in printed


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m ragged_shard.planner --preset llama3-8b --rows 1:512"
    ended = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("llama3-8b: ")


def test_importing_it_loads_the_standard_library_alone():
    assert not loaded_by("import ragged_shard.planner.command_line.command") & HEAVY


def test_that_check_notices_what_is_loaded():
    pytest.importorskip("rich")
    code = (
        "import sys, ragged_shard.planner.command_line.output as t; t.print_table((), sys.stderr)"
    )
    assert "rich" in loaded_by(code) & HEAVY
