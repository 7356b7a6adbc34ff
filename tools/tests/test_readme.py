import re

from tools.workspace import ROOT


def test_the_readme_has_the_two_commands_and_no_other():
    start = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s"
    commands = re.findall(r"^python3 -m venv.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == [f"{start} integration", f"{start} tests"]
