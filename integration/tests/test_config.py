from pathlib import Path

import pytest

from integration.errors import UsageError
from integration.train.config import TrainConfig, parse_config


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def test_no_options_are_the_defaults():
    assert parse_config([]) == TrainConfig()


def test_the_command_line_overrides_toml_which_overrides_the_defaults(tmp_path):
    toml = write(tmp_path, 'system = "ddp"\nsteps = 7\nout = "there"\n')
    config = parse_config(["--config", toml, "--steps", "9"])
    assert (config.system, config.steps, config.out, config.seed) == ("ddp", 9, Path("there"), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", r"run\.toml: stepz = 3: .*"),
        ("steps = 0", r"run\.toml: steps = 0: .*greater than or equal to 1"),
        ('steps = "many"', r"steps = 'many'"),
        ("dp_shard = 0", r"dp_shard = 0: .*expected at least 1, or -1, which takes the rest"),
        ('cp_method = "ulysses-ring:1"', r"cp_method = 'ulysses-ring:1': .*with N of at least 2"),
        ("learning_rate = -1.0", r"learning_rate = -1\.0"),
        ("steps =", "is not valid TOML"),
    ],
)
def test_bad_toml_is_refused_with_key_and_value(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        parse_config(["--config", write(tmp_path, text)])


def test_a_toml_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\x8f\x00")
    with pytest.raises(UsageError, match=r"run\.toml is not valid TOML: .*can't decode byte 0x8f"):
        parse_config(["--config", str(path)])


def test_a_missing_toml_file_is_refused():
    with pytest.raises(
        UsageError, match=r"cannot read the configuration nowhere\.toml.*; give another --config"
    ):
        parse_config(["--config", "nowhere.toml"])


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "x"], ["--stepz", "1"]])
def test_bad_arguments_exit_with_2_and_name_the_option(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_config(arguments)
    assert exit_info.value.code == 2
    assert arguments[0].lstrip("-") in "".join(capsys.readouterr())


@pytest.mark.parametrize("arguments", [["--dp-shard", "-1"], ["--dp-shard=-1"], ["--config"]])
def test_the_rest_of_the_ranks_is_an_option_and_a_key(arguments, tmp_path):
    toml = [write(tmp_path, "dp_shard = -1")] if arguments == ["--config"] else []
    assert parse_config([*arguments, *toml]).dp_shard == -1
