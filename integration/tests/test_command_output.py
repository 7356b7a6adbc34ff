"""What commands show: a bar in a terminal, lines in logs, and a result for readers or programs."""

import io
import json
import math
import sys
from pathlib import Path

import pytest

from integration.report.command_output import ProgressBar, print_result, to_json

DOCUMENT = {"out": Path("runs/a"), "losses": (1.5, math.nan, -math.inf), "steps": {"done": 3}}


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, and keeps what is written."""

    def isatty(self):
        return True


def test_a_document_is_strict_json():
    def refuse(constant):
        pytest.fail(f"{constant} is not JSON")

    found = json.loads(to_json(DOCUMENT), parse_constant=refuse)
    assert found == {"out": "runs/a", "losses": [1.5, "nan", "-inf"], "steps": {"done": 3}}


def test_stdout_has_the_sentence_or_the_document_alone(capsys):
    print_result("done: runs/a", DOCUMENT, as_json=False)
    assert capsys.readouterr() == ("done: runs/a\n", "")
    print_result("done: runs/a", DOCUMENT, as_json=True)
    assert capsys.readouterr() == (f"{to_json(DOCUMENT)}\n", "done: runs/a\n")


def work():
    with ProgressBar() as bar:
        for number, name in enumerate(("one", "two [b]"), 1):
            bar.begin(name, number, 2)
            print(f"{name} is done")
        bar.show("three", 2, 2)


def test_a_log_has_a_line_for_each_part_and_no_bar(capsys):
    work()
    assert capsys.readouterr() == ("one is done\ntwo [b] is done\n", "1/2: one\n2/2: two [b]\n")


def test_a_terminal_has_a_bar_that_is_removed_and_files_get_their_lines(monkeypatch):
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setenv("TERM", "xterm")
    work()
    drawn = terminal.getvalue()
    assert "three" in drawn
    assert "2/2" in drawn
    assert "2/2: two" not in drawn
    assert drawn.endswith("\x1b[2K")  # the line of the bar is erased
    assert file.getvalue() == "one is done\ntwo [b] is done\n"
