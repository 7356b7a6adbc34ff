"""Every command and every Python block of the workspace's pages is looked at by a test."""

import re

import pytest

from tools.readme_commands import Command, commands, pages, problems
from tools.workspace import ROOT

SHOWN = [command for page in pages() for command in commands(page)]
# Pages whose Python blocks do not go through testkit's `examples` of the page's own folder.
ELSEWHERE = {
    str(page.relative_to(ROOT)): "tools/tests/test_examples.py"
    for page in ROOT.glob("docs/packages/*/example.md")
}
ELSEWHERE |= dict.fromkeys(("README.md", "docs/index.md"), "integration/tests/test_pages.py")
ELSEWHERE |= {
    str(page.relative_to(ROOT)): "integration/tests/test_pages.py"
    for folder in ("tutorials", "tasks", "concepts")
    for page in ROOT.glob(f"docs/{folder}/*.md")
}
# Pages about one package, which its own test of the README runs too.
OF_PACKAGES = {
    str(page.relative_to(ROOT)): f"packages/{page.parent.name}/tests/test_readme.py"
    for page in ROOT.glob("docs/packages/*/*.md")
    if page.name != "example.md"
}


def of(text):
    return Command(ROOT / "README.md", text)


def test_the_pages_are_all_there_and_show_commands():
    names = {str(page.relative_to(ROOT)) for page in pages()}
    assert {"README.md", "integration/README.md", "docs/tutorials/first-model.md"} <= names
    assert len([name for name in names if name.startswith("packages/")]) == 7
    assert len(SHOWN) > 80


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_can_run(page):
    found = {command.text: list(problems(command)) for command in commands(page)}
    assert not {text: why for text, why in found.items() if why}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_of_a_page_are_run_by_a_test(page):
    if "```python" not in page.read_text():
        return
    name = str(page.relative_to(ROOT))
    own = f"{page.parent.relative_to(ROOT)}/tests/test_readme.py"
    test = ROOT / (ELSEWHERE | OF_PACKAGES).get(name, own)
    assert test.is_file(), f"{name} has Python blocks, and there is no {test}"
    if name == "testkit/README.md":  # whose own test of `examples` runs it as well
        assert "README" in test.read_text()
    elif name in OF_PACKAGES:
        assert "page_examples(__file__)" in test.read_text()
    elif name not in ELSEWHERE:
        assert re.search(r"\bexamples\(__file__\)", test.read_text())


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_a_page_names_exist(page):
    own = [ROOT, page.parent, page.parent / "tests", *ROOT.glob("packages/*")]
    for name in re.findall(r"`(?:pytest )?((?:[\w-]+/)*test_\w+\.py)", page.read_text()):
        assert any((folder / name).is_file() for folder in own), name


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nox -s tset", "there is no session tset"),
        ('nox -s "release(dist-rgn)"', "there is no project dist-rgn"),
        ("nox -s tests -- fsdp dist-rgn -k a", "there is no project dist-rgn"),
        ("nox -s bench -- fdsp", "there is no run.py in "),
        ('nox -s bench -- fsdp "--model=a b"', "run.py has no --model=a b"),
        ("python packages/fsdp/benchmarks/muno.py", "there is no muno.py in "),
        ("python packages/fsdp/benchmarks/muon.py --round=9", "muon.py has no --round=9"),
        ("pytest packages/fsdp/tests/test_no.py -k a", "there is no packages/fsdp/tests/test_no"),
        ("pytest packages/*/tests/test_no.py", "there is no packages/*/tests/test_no"),
        ("python -m integration.trian --help", "there is no module integration.trian"),
        ("python -m tools.plan_line", "there is no module tools.plan_line"),
        ("torchrun --nproc-per-node 2 -m integration.no", "there is no module integration.no"),
        ("pip install ./packages/fsdp", "packages/fsdp needs dbuffer, which is not on an index"),
        ('pip install "./packages/plan-api[ragged]"', "packages/plan-api needs ragged-shard"),
        ('pip install -c siblings.txt "./packages/fsdp[rugs]"', "packages/fsdp has no extra rugs"),
        ("pip install ./packages/nope", "packages/nope is no project"),
        ("tools/no.sh", "nobody knows how to check 'tools/no.sh'"),
    ],
)
def test_a_command_that_cannot_run_is_found(text, sentence):
    assert any(why.startswith(sentence) or sentence in why for why in problems(of(text)))


@pytest.mark.parametrize(
    "text",
    [
        'nox -s "compat(2.11)" -- fsdp',
        "nox -s bench -- PACKAGE",
        "pip check",
        "X=1 python train.py",
        'pip install -c siblings.txt "./packages/fsdp[rules,rng]"',
        "python packages/fsdp/benchmarks/muon.py --rounds=9",  # of a parser in a module beside it
        "pytest packages/fsdp/tests/test_muon.py::test_x -k a",
        "pytest packages/*/tests/test_sim.py",
    ],
)
def test_a_command_that_can_run_is_not(text):
    assert list(problems(of(text))) == []


def test_commands_are_found_in_blocks_lists_and_text(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(
        "Text with `nox -s lint` and `nox` and `a.py`.\n\n"
        "```\npip install a  # why\ncd b && tools/gpu.sh\noutput\n```\n\n"
        "- in a list:\n\n  ```sh\n  c++ x \\\n    -o y\n  ```\n\n"
        "```python\nnox = 1\n```\n"
    )
    assert [command.text for command in commands(page)] == [
        *("pip install a", "tools/gpu.sh", "c++ x -o y"),
        *("nox -s lint", "nox"),
    ]
