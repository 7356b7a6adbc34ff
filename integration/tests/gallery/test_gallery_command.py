"""The command of the gallery, and that every picture of the documentation is one of it."""

import shutil
from pathlib import Path

import pytest

from integration.gallery.__main__ import main
from integration.gallery.picture import MOST_BYTES
from integration.gallery.pictures import discover

PICTURES = discover()
COMMITTED = Path(__file__).parents[3] / "docs" / "gallery"
# Measured pictures have tests of their own, at tiny sizes, and padding takes many seconds.
DRAWN = [
    pytest.param(name, marks=[pytest.mark.skipif(not shutil.which("chromium"), reason="no browser")]
                 if name == "plan_view" else [])
    for name, picture in PICTURES.items() if not picture.is_measured and name != "padding"
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_drawn(name, tmp_path, capsys):
    assert main([name, "--out", str(tmp_path)]) == 0
    path = tmp_path / PICTURES[name].file
    assert capsys.readouterr().out == f"{path}\n"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_documentation_has_every_picture_and_no_other():
    assert sorted(path.stem for path in COMMITTED.glob("*.png")) == sorted(PICTURES)
    assert all(path.stat().st_size <= MOST_BYTES for path in COMMITTED.glob("*.png"))


def test_an_unknown_picture_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["landscape"])
    assert "got landscape" in capsys.readouterr().err
