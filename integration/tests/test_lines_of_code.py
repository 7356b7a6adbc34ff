"""The table of lines of code counts files that models are trained by."""

import base64
import hashlib
import inspect
import re
from importlib.metadata import files as files_of
from pathlib import Path

import pytest

from integration.models import build_model_on_meta, model_shape
from integration.report.lines_of_code import PAPER, LinesOfCode, count_efforts, loc_table, main
from integration.systems.torchtitan import styles
from integration.systems.torchtitan.data_parallel import apply_fsdp
from integration.systems.torchtitan.decoder import attention, parallelize_ends
from integration.systems.torchtitan.system import APPLY_TP


def counted():
    return {(each.family, each.system): each.counted for each in count_efforts() if each.counted}


def test_each_model_is_written_by_a_plan_and_in_torchtitans_way():
    systems = ("plan", "torchtitan-style")
    assert set(counted()) == {(family, system) for family in APPLY_TP for system in systems}


def test_the_pages_figures_are_those_that_are_counted():
    page = (Path(__file__).parents[2] / "docs" / "benchmarks" / "integration.md").read_text()
    for row in loc_table().rows:
        assert f"| {' | '.join(row)} |\n" in page


def lines_of_bodies(*functions):
    bodies = [inspect.getsource(function).split('"""')[2].splitlines() for function in functions]
    return sum(bool(line.strip()) for body in bodies for line in body)


def test_torchtitans_lines_are_all_of_its_functions():
    # All run whole, so that what a tracer sees is what can be read off the files.
    found = {family: lines for (family, way), lines in counted().items() if way != "plan"}
    decoder = (parallelize_ends, attention, apply_fsdp)
    assert found["llama"] == LinesOfCode(0, lines_of_bodies(APPLY_TP["llama"], *decoder), 0)
    assert found["dit"] == LinesOfCode(0, lines_of_bodies(APPLY_TP["dit"], apply_fsdp), 0)
    assert found["mixtral"].plan == lines_of_bodies(APPLY_TP["mixtral"], *decoder)


def test_of_mixtral_the_styles_that_torch_lacks_are_counted_too():
    (found,) = (lines for key, lines in counted().items() if key == ("mixtral", "torchtitan-style"))
    text = inspect.getsource(styles)
    bodies = text[text.index("class NoParallel") :].splitlines()
    lines = [line for line in bodies if line.startswith("        ") and "#" not in line]
    assert found.runtime == len(lines)


@pytest.mark.parametrize("name", ["llama-tiny", "mixtral-tiny"])
def test_no_line_of_transformers_model_is_changed(name):
    source = Path(inspect.getsourcefile(type(build_model_on_meta(model_shape(name)))))
    (packed,) = (
        each for each in files_of("transformers") if each.locate().resolve() == source.resolve()
    )
    digest = hashlib.new(packed.hash.mode, source.read_bytes()).digest()
    assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == packed.hash.value


def test_the_papers_totals():
    totals = {
        system: [lines.total for lines in models.values()] for system, models in PAPER.items()
    }
    assert totals == {
        "veScale": [29, 38, 38],
        "TorchTitan": [63, 100, 95],
        "Megatron-LM": [126, 162, 82],
        "Megatron-DeepSpeed": [130, 176, 86],
    }


def test_a_row_has_a_cell_for_each_column_and_dashes_where_nothing_is_written(monkeypatch, capsys):
    table = loc_table()
    assert all(len(row) == len(table.columns) for row in table.rows)
    megatron = next(row for row in table.rows if "Megatron-LM" in row)
    assert megatron == ("llama", *["\N{EN DASH}"] * 5, "126 + 0 + 0 = 126", "Megatron-LM")
    monkeypatch.setenv("COLUMNS", "160")
    main()
    printed = capsys.readouterr().out
    assert re.search(r"torchtitan-style +0 ", printed)
    assert len(printed.rstrip().splitlines()) == 1 + len(table.rows)
