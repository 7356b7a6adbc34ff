"""The simulation's command: what it writes, what it measures, what it refuses."""

import json

import pytest

from integration.scale.__main__ import main
from integration.scale.curves import sized
from integration.scale.dispatch import measure_dispatch
from integration.scale.initialisation import initialise, measure
from integration.scale.padding import paddings
from integration.scale.shapes import SHAPES, Depth, shape_named
from integration.scale.strategies import strategy_named

QUICK = ["--models", "llama3-70b", "--strategies", "FSDP", "--ranks", "128,64"]


def test_the_command_writes_a_report(tmp_path, capsys):
    left_out = ["--no-initialisation", "--no-dispatch", "--model-scaling", ""]
    assert main([*QUICK, *left_out, "--out", str(tmp_path), "--json"]) == 0
    printed, report = capsys.readouterr(), tmp_path / "report.html"
    assert printed.err.splitlines()[1:] == [
        "2/3: counting llama3-70b, FSDP, 128 ranks",
        "3/3: padding and model scaling",
        f"simulated 2 steps of 1 models on up to 128 ranks: {report}",
    ]
    found = json.loads((tmp_path / "scale.json").read_text())
    assert json.loads(printed.out) == found | {"report": str(report)}
    assert [(one["strategy"], one["ranks"]) for one in found["counts"]] == [
        ("FSDP", 64),
        ("FSDP", 128),
    ]
    assert {one["ranks"] for one in found["paddings"]} == {64, 128}
    assert [len(curve["points"]) for curve in found["weak"]] == [2]
    assert found["grown"] == found["initialisations"] == []
    markdown = (tmp_path / "report.md").read_text()
    assert "| llama3-70b | FSDP | 128 | 161: " in markdown
    assert "The model leaves out activation checkpointing" in markdown
    for name in ("weak", "strong", "traffic", "padding"):
        assert f"figures/{name}.png" in markdown
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    html = (tmp_path / "report.html").read_text()
    assert html.count("data:image/svg+xml;base64,") == 8  # light and dark
    assert "--efficiency 0.5" in html
    assert "--json" not in html
    assert "http" not in html.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks", "60"], "--ranks: expected a multiple of the 8 ranks of a node"),
        (
            ["--ranks", "64,x"],
            "--ranks: expected whole numbers above 0, separated by commas, got '64,x'",
        ),
        (["--ranks", ","], "--ranks: expected names, got ','"),
        (["--models", "gpt-2"], "got 'gpt-2'"),
        (["--strategies", "DDP"], "got 'DDP'"),
        (["--model-scaling", "gpt-2"], "got 'gpt-2'"),
        (["--efficiency", "1.5"], "efficiency: expected a share of at most 1, got 1.5"),
        (["--weak-tokens", "0"], "--weak-tokens: expected at least 1, got 0"),
        (["--strong-tokens", "0"], "--strong-tokens: expected whole numbers above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(arguments, sentence, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*arguments, "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert not out.exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert main(["--out", str(tmp_path / "out")]) == 2
    assert "is a file, not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "measured_by",
    [initialise, pytest.param(measure, marks=pytest.mark.slow)],
    ids=["here", "in a process of its own"],
)
def test_initialisation_is_measured_on_meta(measured_by):
    found = measured_by("llama3-70b", "HSDP", 512, Depth(2, 0))
    assert min(found.mesh, found.model_on_meta, found.distribute) > 0
    assert found.memory < 2**30  # its parameters are on meta


@pytest.mark.parametrize("layers", [1, 3])
def test_what_is_initialised_has_the_given_number_of_layers(layers, monkeypatch):
    built = []
    monkeypatch.setattr(
        "integration.scale.initialisation.distribute", lambda model, *_: built.append(model)
    )
    initialise("llama3-70b", "FSDP", 64, Depth(layers, 0))
    assert [len(model.model.layers) for model in built] == [layers]


def test_dispatch_of_a_strategy_comes_on_top_of_the_layer():
    found = measure_dispatch(shape_named("llama3-70b"), strategy_named("FSDP"), 64, rounds=3)
    assert 0 < found.plain < found.layer
    assert found.cost == found.layer - found.plain
    with pytest.raises(ValueError, match="expected a model without experts, got mixtral-8x7b"):
        measure_dispatch(shape_named("mixtral-8x7b"), strategy_named("FSDP"), 64)


def test_paddings_are_the_planners():
    found = {(one.rows, one.ranks): one.share for one in paddings("deepseek-v3", [1024])}
    # As docs/packages/ragged-shard/details.md has it.
    assert f"{found[1, 1024]:.3%}" == "0.016%"
    assert f"{found[128, 1024]:.3%}" == "7.267%"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_model_of_its_own_size_is_the_published_one(shape):
    made = sized(shape, 1.0)
    assert made.depth == shape.depth
    assert made.parameters == pytest.approx(shape.parameters, rel=1e-6)
    assert 3.5 < sized(shape, 2.0).parameters / made.parameters < 4.0 or shape.zoo == "llama"
