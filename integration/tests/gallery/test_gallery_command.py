"""The command of the gallery, and that every picture of the documentation is one of it."""

import json
from pathlib import Path

import pytest

from integration.gallery.__main__ import main
from integration.gallery.picture import MOST_BYTES
from integration.gallery.pictures import discover, plan_view

PICTURES = discover()
COMMITTED = Path(__file__).parents[3] / "docs" / "gallery"
# Measured pictures have tests of their own, at tiny sizes; padding takes many seconds; the view of
# a plan needs a browser, which draws its page.
DRAWN = sorted(PICTURES.keys() - {"flame", "padding", "plan_view", "steps"})


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != DRAWN[0])) for name in DRAWN]
)
def test_a_picture_is_drawn(name, tmp_path, capsys):
    assert main([name, "--out", str(tmp_path), "--json"]) == 0
    path = tmp_path / PICTURES[name].file
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "pictures": [{"name": name, "path": str(path), "bytes": path.stat().st_size}]
    }
    assert printed.err == f"1/1: {name}\ndrawn: 1 picture in {tmp_path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_page_of_the_plan_view_has_the_communication_of_a_step(tmp_path):
    page = plan_view.write_page(tmp_path / "plan.html").read_text()
    assert "model.layers.0.mlp" in page
    assert "all_gather" in page


def test_without_a_browser_the_plan_view_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="expected chromium or google-chrome"):
        plan_view.draw()


def test_the_documentation_has_every_picture_and_no_other():
    assert sorted(path.stem for path in COMMITTED.glob("*.png")) == sorted(PICTURES)
    assert all(path.stat().st_size <= MOST_BYTES for path in COMMITTED.glob("*.png"))


def test_an_unknown_picture_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["landscape"])
    assert "got landscape" in capsys.readouterr().err
