"""Commands of the README and of its pages get through the programs' own checks."""

import json
import re
import shlex
from pathlib import Path

import pytest

from integration.compare.options import CompareOptions, parse_options
from integration.compare.setup import prepare as prepare_comparison
from integration.hugging_face.__main__ import main as export
from integration.pipeline import bubble
from integration.recommend import options as recommend_options
from integration.recommend.options import RecommendOptions
from integration.report.run import ReportOptions
from integration.sampling import SampleOptions, Sampling, TextSampling
from integration.sampling import main as sample
from integration.scale.options import ScaleOptions
from integration.scale.options import parse_options as parse_scale
from integration.scale.options import prepare as prepare_scale
from integration.soak.options import SoakOptions
from integration.soak.options import parse_options as parse_soak
from integration.soak.options import prepare as prepare_soak
from integration.train.config import TrainConfig, parse_config
from integration.train.setup import prepare as prepare_run
from testkit.inspection.readme import blocks

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "integration" / "README.md",
    *sorted((ROOT / "docs" / "integration").glob("*.md")),
    *sorted((ROOT / "docs" / "benchmarks").glob("integration*.md")),
]
TEXT = "\n".join(page.read_text() for page in PAGES)
LINES = [line for block in blocks(TEXT, "") for line in block.splitlines()]
LINES += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))


def commands(start):
    """Returns what follows the words that commands of a program begin with."""
    found = [line.partition("  #")[0].strip() for line in LINES]
    found = [line.removeprefix(".venv/bin/") for line in found]
    return [line.removeprefix(start).strip() for line in found if re.match(rf"{start}( |$)", line)]


TRAIN = commands("python -m integration.train")
NOX = [line.removeprefix("--").strip() for line in commands("nox -s integration")]
SCALE = [line.removeprefix("scale").strip() for line in NOX if line.startswith("scale")]
SCALE += commands("python -m integration.scale")
SOAK = [line.removeprefix("soak").strip() for line in NOX if line.startswith("soak")]
SOAK += commands("python -m integration.soak")
COMPARE = [line for line in NOX if not line.startswith(("scale", "soak"))]
COMPARE += commands("python -m integration.compare")


def test_commands_were_found():
    assert min(map(len, (TRAIN, COMPARE, SCALE))) > 2
    assert len(SOAK) > 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one to run in, with what commands take as given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "PATH").mkdir()
    (tmp_path / "PATH" / "text.txt").write_text("All work and no play. " * 5000)
    (tmp_path / "run.toml").write_text('model = "llama-tiny"\nsteps = 2\n')
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "recipe.toml").write_text('model = "llama-tiny"\n')
    (tmp_path / "integration").mkdir()
    (tmp_path / "integration" / "recipes").symlink_to(ROOT / "integration" / "recipes")
    return tmp_path


@pytest.mark.parametrize("line", TRAIN)
def test_a_training_command_is_accepted(line, folder, capsys):
    if line == "--help":
        with pytest.raises(SystemExit, match="0"):
            parse_config([line])
        assert "--pp-schedule" in capsys.readouterr().out
        return
    config = parse_config(shlex.split(line))
    prepare_run(config, config.ranks or 1)


@pytest.mark.parametrize("line", COMPARE)
def test_a_comparison_is_accepted(line, folder):
    comparison = prepare_comparison(parse_options(shlex.split(line)))
    assert comparison.jobs


def test_recommendations_are_accepted(folder):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(config | sizes | heads))
    lines = [line for line in commands("python -m integration.recommend") if line]
    for line in lines:
        assert recommend_options.prepare(recommend_options.parse_options(shlex.split(line)))
    assert len(lines) > 2


@pytest.mark.parametrize("line", SCALE)
def test_a_simulation_is_accepted(line, folder):
    assert prepare_scale(parse_scale(shlex.split(line))).worlds


@pytest.mark.parametrize("line", SOAK)
def test_a_soak_is_accepted(line, folder):
    assert prepare_soak(parse_soak(shlex.split(line)))


def test_torchruns_lines_are_accepted(folder):
    lines = commands("torchrun")
    assert lines
    for line in lines:
        options, arguments = line.split(" -m integration.train ")
        ranks = int(options.split("--nproc-per-node ")[1])
        assert prepare_run(parse_config(shlex.split(arguments)), ranks).config.steps == 2


def test_the_other_programs_take_what_the_pages_give_them(folder, monkeypatch, capsys):
    (line,) = commands("python -m integration.hugging_face")
    assert export(line.split()) == 2  # its parser took them, and there is no such checkpoint
    assert "CHECKPOINT is not a complete checkpoint" in capsys.readouterr().err
    for line in commands("python -m integration.sampling"):
        assert sample(shlex.split(line)) == 2
        assert "is not a complete checkpoint" in capsys.readouterr().err
    asked = []
    monkeypatch.setattr(bubble, "measure", lambda *arguments: asked.append(arguments) or 1 / 0)
    lines = commands("python -m integration.pipeline.bubble")
    for line in lines:
        with pytest.raises(ZeroDivisionError):
            bubble.main(line.split())
    assert len(asked) == len(lines) > 0


def test_options_that_the_pages_name_exist(folder):
    of = (TrainConfig, ScaleOptions, SoakOptions, SampleOptions, Sampling, TextSampling)
    of = (*of, ReportOptions, RecommendOptions)
    known = {field for options in of for field in options.__dataclass_fields__}
    words = [word for word in CompareOptions().command_line() if word.startswith("--")]
    known |= {word[2:].replace(".no-", ".").replace("-", "_") for word in words}
    options = CompareOptions()  # of options that are None the command line has nothing
    for one in options.selected():
        known |= {f"{one.option_prefix}.{name}" for name in vars(options.options_of(one))}
    # Of parsers, of torch, of torchrun, of pip and of benchmarks.
    beside = {"help", "config", "prefix", "nproc-per-node", "no-deps", "rdzv-id", "max-restarts"}
    beside |= {"rounds"}
    for option in set(re.findall(r"--([a-z][\w.-]*\w)", "\n".join(LINES))) - beside:
        field = option.replace("-", "_")
        assert known & {field, field.removeprefix("no_"), f"no_{field}"}, option
