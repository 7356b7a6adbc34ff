"""What the command line takes, and how it refuses the rest."""

import pytest

from ragged_shard.planner.command_line.arguments import counts, parse
from ragged_shard.planner.models.presets import PRESETS


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8", (8,)),
        ("96,8,8", (8, 96)),
        ("8:64", (8, 16, 32, 64)),
        ("3:20", (3, 6, 12)),
        ("5:5", (5,)),
        ("8:16,12, 1", (1, 8, 12, 16)),
    ],
)
def test_counts_are_numbers_lists_and_ranges_of_doublings(text, numbers):
    assert counts(text) == numbers


@pytest.mark.parametrize(
    "text", ["", "0", "-8", "8,", "1.5", "8:0", ":8", "8:", "8:16:32", "two", "²"]
)
def test_what_is_no_count_is_refused_and_named(text):
    with pytest.raises(ValueError, match="expected integers above 0, such as 8, 8,96 or 8:4096"):
        counts(text)


def test_a_range_that_goes_down_is_refused():
    with pytest.raises(ValueError, match="smaller number is first, got '64:8'"):
        counts("1,64:8")


def test_the_defaults_are_those_of_the_papers_figure():
    options = parse(["--preset", "deepseek-v3"])
    assert options.world_sizes == (8, 16, 32, 64, 128, 256, 512, 1024)
    assert options.rows == (1, 16, 128)
    assert (options.target, options.order, options.alignment) == (None, "given", 1)
    assert options.tolerance == 0.001


def test_the_tolerance_is_a_percentage():
    assert parse(["--preset", "x", "--tolerance", "2.5"]).tolerance == 0.025


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --preset --from-model is required"),
        (
            ["--preset", "a", "--from-model", "b"],
            "--from-model: not allowed with argument --preset",
        ),
        (
            ["--preset", "a", "--world-size", "0"],
            "--world-size: expected integers above 0",
        ),
        (["--preset", "a", "--rows", "x"], "argument --rows: expected integers above 0"),
        (
            ["--preset", "a", "--alignment", "0"],
            "--alignment: expected an integer above 0",
        ),
        (
            ["--preset", "a", "--tolerance", "-1"],
            "expected a percentage of 0 or more, got -1",
        ),
        (
            ["--preset", "a", "--tolerance", "nan"],
            "a percentage of 0 or more, got nan",
        ),
        (["--preset", "a", "--tolerance", "x"], "argument --tolerance: expected a number, got 'x'"),
        (["--preset", "a", "--experts", "both"], "argument --experts: invalid choice: 'both'"),
        (["--preset", "a", "--what"], "unrecognized arguments: --what"),
        (["--preset", "a", "--recom"], "unrecognized arguments: --recom"),
    ],
)
def test_what_cannot_be_understood_ends_with_one_line_and_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert printed.err.startswith("python -m ragged_shard.planner: ")
    assert message in printed.err


def test_help_names_every_preset_and_explains_the_trade(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for name, preset in PRESETS.items():
        assert f"{name} {preset.parameters:,} {preset.source}" in printed
    assert "In a larger group each rank holds less" in printed
